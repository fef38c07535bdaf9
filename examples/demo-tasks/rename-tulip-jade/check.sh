! grep -q 'tulip_jade' lib.py main.py notes.md && grep -q 'def larch_slate' lib.py && grep -q 'larch_slate' notes.md && test "$(python3 main.py)" = '16'
