set -e
grep -rn --exclude-dir=.git 'tulip_jade' .
sed -i 's/tulip_jade/larch_slate/g' lib.py main.py notes.md
python3 main.py
