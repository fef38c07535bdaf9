#!/bin/bash
set -e
sed -i 's/\blarch\b/grove/g' quartz.txt
