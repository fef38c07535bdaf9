#!/bin/bash
# Runs in the work folder; LOGS_DIR is set where /logs cannot be.
logs="${LOGS_DIR:-/logs}/verifier"
mkdir -p "$logs"
passed() {
cd river && test -f islet.md && test ! -e islet.txt && test -f heron.md && test ! -e heron.txt && test -f maple.md && test ! -e maple.txt && test -f slate.md && test ! -e slate.txt && test -f pearl.md && test ! -e pearl.txt && grep -q 'about islet' islet.md
}
if passed; then echo 1 > "$logs/reward.txt"; else echo 0 > "$logs/reward.txt"; fi
