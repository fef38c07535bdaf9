set -e
wc -l slate.txt
LC_ALL=C sort -u slate.txt > unique.txt
cat unique.txt
