set -e
ls conf
sed -n 's/^timeout = //p' conf/north.ini > answer.txt
cat answer.txt
