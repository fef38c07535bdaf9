set -e
cat jade.py test_all.py
sed -i 's/return .*/return len(set(values))/' jade.py
python3 test_all.py
