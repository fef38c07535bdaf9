set -e
wc -l pearl.txt
LC_ALL=C sort -u pearl.txt > unique.txt
cat unique.txt
