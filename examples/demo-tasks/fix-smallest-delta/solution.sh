set -e
cat delta.py test_all.py
sed -i 's/return .*/return sorted(values)[0]/' delta.py
python3 test_all.py
