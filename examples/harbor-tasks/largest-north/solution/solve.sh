#!/bin/bash
set -e
ls -S north | head -1 > largest.txt
