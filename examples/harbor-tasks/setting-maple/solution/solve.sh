#!/bin/bash
set -e
sed -i '/\[server\]/,/^$/ s/^port = .*/port = 7432/' maple.ini
