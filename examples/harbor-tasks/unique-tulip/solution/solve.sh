#!/bin/bash
set -e
LC_ALL=C sort -u tulip.txt > unique.txt
