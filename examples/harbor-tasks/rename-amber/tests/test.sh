#!/bin/bash
# Runs in the work folder; LOGS_DIR is set where /logs cannot be.
logs="${LOGS_DIR:-/logs}/verifier"
mkdir -p "$logs"
passed() {
cd amber && test -f jade.md && test ! -e jade.txt && test -f islet.md && test ! -e islet.txt && test -f maple.md && test ! -e maple.txt && test -f amber.md && test ! -e amber.txt && test -f tulip.md && test ! -e tulip.txt && grep -q 'about jade' jade.md
}
if passed; then echo 1 > "$logs/reward.txt"; else echo 0 > "$logs/reward.txt"; fi
