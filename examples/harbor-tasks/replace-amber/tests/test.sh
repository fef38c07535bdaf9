#!/bin/bash
# Runs in the work folder; LOGS_DIR is set where /logs cannot be.
logs="${LOGS_DIR:-/logs}/verifier"
mkdir -p "$logs"
passed() {
diff -q amber.txt - <<'END' >/dev/null
amber amberlarch
amber larchlarch
stone riverlarch
amber olivelarch
amber heronlarch
stone slatelarch
stone emberlarch
stone tuliplarch
amber riverlarch
amber kelplarch
amber grovelarch
stone olivelarch
END
}
if passed; then echo 1 > "$logs/reward.txt"; else echo 0 > "$logs/reward.txt"; fi
