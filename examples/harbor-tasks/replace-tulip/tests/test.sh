#!/bin/bash
# Runs in the work folder; LOGS_DIR is set where /logs cannot be.
logs="${LOGS_DIR:-/logs}/verifier"
mkdir -p "$logs"
passed() {
diff -q tulip.txt - <<'END' >/dev/null
stone maplebirch
stone kelpbirch
pearl grovebirch
stone pearlbirch
stone northbirch
pearl kelpbirch
stone slatebirch
stone amberbirch
stone kelpbirch
stone quartzbirch
pearl larchbirch
pearl heronbirch
END
}
if passed; then echo 1 > "$logs/reward.txt"; else echo 0 > "$logs/reward.txt"; fi
