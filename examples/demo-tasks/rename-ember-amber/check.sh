! grep -q 'ember_amber' lib.py main.py notes.md && grep -q 'def birch_ember' lib.py && grep -q 'birch_ember' notes.md && test "$(python3 main.py)" = '49'
