#!/bin/bash
set -e
cat $(ls birch/part-* | sort -V) > whole.txt
