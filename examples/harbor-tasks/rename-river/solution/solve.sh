#!/bin/bash
set -e
cd river; for f in *.txt; do mv "$f" "${f%.txt}.md"; done
