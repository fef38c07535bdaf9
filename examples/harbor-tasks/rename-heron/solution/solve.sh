#!/bin/bash
set -e
cd heron; for f in *.txt; do mv "$f" "${f%.txt}.md"; done
