#!/bin/bash
set -e
LC_ALL=C sort -u amber.txt > unique.txt
