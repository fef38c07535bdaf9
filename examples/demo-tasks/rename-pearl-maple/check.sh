! grep -q 'pearl_maple' lib.py main.py notes.md && grep -q 'def tulip_north' lib.py && grep -q 'tulip_north' notes.md && test "$(python3 main.py)" = '16'
