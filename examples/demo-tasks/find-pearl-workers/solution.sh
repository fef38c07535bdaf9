set -e
ls conf
sed -n 's/^workers = //p' conf/pearl.ini > answer.txt
cat answer.txt
