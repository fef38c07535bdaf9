set -e
cat quartz.csv
python3 -c "import csv, json; json.dump(list(csv.DictReader(open('quartz.csv'))), open('quartz.json', 'w'))"
cat quartz.json
