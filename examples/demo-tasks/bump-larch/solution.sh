set -e
cat package.json
sed -i 's/1.9.2/1.10.0/' package.json
cat package.json
