#!/bin/bash
set -e
ls -S grove | head -1 > largest.txt
