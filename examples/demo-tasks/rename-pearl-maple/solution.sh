set -e
grep -rn --exclude-dir=.git 'pearl_maple' .
sed -i 's/pearl_maple/tulip_north/g' lib.py main.py notes.md
python3 main.py
