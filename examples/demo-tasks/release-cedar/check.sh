test "$(git log -1 --format=%s v20)" = 'release 20' && git show v20:CHANGES | tail -1 | grep -qx 'release 20' && test -z "$(git status --porcelain -- CHANGES)"
