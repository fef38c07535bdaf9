set -e
ls conf
sed -n 's/^port = //p' conf/cedar.ini > answer.txt
cat answer.txt
