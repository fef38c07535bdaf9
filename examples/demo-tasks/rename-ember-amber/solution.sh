set -e
grep -rn --exclude-dir=.git 'ember_amber' .
sed -i 's/ember_amber/birch_ember/g' lib.py main.py notes.md
python3 main.py
