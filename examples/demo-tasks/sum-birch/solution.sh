set -e
head -4 sales.csv
awk -F, '$1=="birch"{s+=$2*$3} END{print s}' sales.csv > total.txt
cat total.txt
