#!/bin/bash
# Runs in the work folder; LOGS_DIR is set where /logs cannot be.
logs="${LOGS_DIR:-/logs}/verifier"
mkdir -p "$logs"
passed() {
diff -q quartz.txt - <<'END' >/dev/null
grove amberlarch
grove pearllarch
stone fjordlarch
grove jadelarch
grove amberlarch
stone tuliplarch
grove emberlarch
grove northlarch
stone grovelarch
grove isletlarch
grove pearllarch
grove quartzlarch
END
}
if passed; then echo 1 > "$logs/reward.txt"; else echo 0 > "$logs/reward.txt"; fi
