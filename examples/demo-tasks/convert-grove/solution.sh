set -e
cat grove.csv
python3 -c "import csv, json; json.dump(list(csv.DictReader(open('grove.csv'))), open('grove.json', 'w'))"
cat grove.json
