set -e
head -4 sales.csv
awk -F, '$1=="pearl"{s+=$2*$3} END{print s}' sales.csv > total.txt
cat total.txt
