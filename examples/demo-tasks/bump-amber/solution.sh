set -e
cat package.json
sed -i 's/0.0.3/0.1.0/' package.json
cat package.json
