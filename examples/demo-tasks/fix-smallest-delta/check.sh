git diff --quiet HEAD -- test_all.py && test "$(python3 test_all.py)" = 'passed'
