set -e
cat slate.py test_all.py
sed -i 's/return .*/return len(set(values))/' slate.py
python3 test_all.py
