#!/bin/bash
set -e
grep -c ' ERROR ' olive.log > count.txt
