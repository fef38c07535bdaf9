#!/bin/bash
# Runs in the work folder; LOGS_DIR is set where /logs cannot be.
logs="${LOGS_DIR:-/logs}/verifier"
mkdir -p "$logs"
passed() {
cd heron && test -f tulip.md && test ! -e tulip.txt && test -f ember.md && test ! -e ember.txt && test -f maple.md && test ! -e maple.txt && test -f pearl.md && test ! -e pearl.txt && test -f larch.md && test ! -e larch.txt && grep -q 'about tulip' tulip.md
}
if passed; then echo 1 > "$logs/reward.txt"; else echo 0 > "$logs/reward.txt"; fi
