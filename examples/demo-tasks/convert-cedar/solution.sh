set -e
cat cedar.csv
python3 -c "import csv, json; json.dump(list(csv.DictReader(open('cedar.csv'))), open('cedar.json', 'w'))"
cat cedar.json
