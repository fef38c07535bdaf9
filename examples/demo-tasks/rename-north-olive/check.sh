! grep -q 'north_olive' lib.py main.py notes.md && grep -q 'def birch_quartz' lib.py && grep -q 'birch_quartz' notes.md && test "$(python3 main.py)" = '64'
