set -e
cat amber.py test_all.py
sed -i 's/return .*/return sum(values)/' amber.py
python3 test_all.py
