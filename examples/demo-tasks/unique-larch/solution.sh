set -e
wc -l larch.txt
LC_ALL=C sort -u larch.txt > unique.txt
cat unique.txt
