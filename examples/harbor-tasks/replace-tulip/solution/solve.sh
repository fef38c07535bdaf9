#!/bin/bash
set -e
sed -i 's/\bbirch\b/pearl/g' tulip.txt
