#!/bin/bash
set -e
cat $(ls larch/part-* | sort -V) > whole.txt
