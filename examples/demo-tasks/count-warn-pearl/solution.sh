set -e
head -3 app.log
grep -c ' WARN ' app.log > count.txt
cat count.txt
