#!/bin/bash
set -e
grep -c ' ERROR ' pearl.log > count.txt
