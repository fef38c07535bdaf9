set -e
grep -rn --exclude-dir=.git 'north_olive' .
sed -i 's/north_olive/birch_quartz/g' lib.py main.py notes.md
python3 main.py
