set -e
ls conf
sed -n 's/^retries = //p' conf/larch.ini > answer.txt
cat answer.txt
