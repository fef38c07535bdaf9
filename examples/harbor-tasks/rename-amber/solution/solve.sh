#!/bin/bash
set -e
cd amber; for f in *.txt; do mv "$f" "${f%.txt}.md"; done
