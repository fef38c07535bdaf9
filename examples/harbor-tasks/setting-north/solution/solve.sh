#!/bin/bash
set -e
sed -i '/\[server\]/,/^$/ s/^port = .*/port = 2936/' north.ini
