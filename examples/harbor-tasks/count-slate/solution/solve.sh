#!/bin/bash
set -e
grep -c ' ERROR ' slate.log > count.txt
