set -e
cat package.json
sed -i 's/1.6.8/1.7.0/' package.json
cat package.json
