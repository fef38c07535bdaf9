set -e
head -3 app.log
grep -c ' ERROR ' app.log > count.txt
cat count.txt
