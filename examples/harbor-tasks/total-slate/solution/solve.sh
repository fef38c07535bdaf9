#!/bin/bash
set -e
awk -F, '$1 == "bob" { s += $2 } END { print s }' slate.csv > total.txt
