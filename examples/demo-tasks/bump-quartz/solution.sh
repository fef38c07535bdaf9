set -e
cat package.json
sed -i 's/1.3.2/1.4.0/' package.json
cat package.json
