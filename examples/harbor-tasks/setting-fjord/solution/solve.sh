#!/bin/bash
set -e
sed -i '/\[server\]/,/^$/ s/^port = .*/port = 3230/' fjord.ini
