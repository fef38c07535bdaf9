set -e
wc -l heron.txt
LC_ALL=C sort -u heron.txt > unique.txt
cat unique.txt
