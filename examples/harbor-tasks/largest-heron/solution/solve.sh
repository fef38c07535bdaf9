#!/bin/bash
set -e
ls -S heron | head -1 > largest.txt
