test "$(git log -1 --format=%s v22)" = 'release 22' && git show v22:CHANGES | tail -1 | grep -qx 'release 22' && test -z "$(git status --porcelain -- CHANGES)"
