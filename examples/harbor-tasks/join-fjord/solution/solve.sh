#!/bin/bash
set -e
cat $(ls fjord/part-* | sort -V) > whole.txt
