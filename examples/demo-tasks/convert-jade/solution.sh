set -e
cat jade.csv
python3 -c "import csv, json; json.dump(list(csv.DictReader(open('jade.csv'))), open('jade.json', 'w'))"
cat jade.json
