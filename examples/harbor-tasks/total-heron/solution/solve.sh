#!/bin/bash
set -e
awk -F, '$1 == "bob" { s += $2 } END { print s }' heron.csv > total.txt
