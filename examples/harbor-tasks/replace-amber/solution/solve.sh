#!/bin/bash
set -e
sed -i 's/\blarch\b/amber/g' amber.txt
