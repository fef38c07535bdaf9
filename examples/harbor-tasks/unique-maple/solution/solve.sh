#!/bin/bash
set -e
LC_ALL=C sort -u maple.txt > unique.txt
