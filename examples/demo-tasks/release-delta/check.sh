test "$(git log -1 --format=%s v39)" = 'release 39' && git show v39:CHANGES | tail -1 | grep -qx 'release 39' && test -z "$(git status --porcelain -- CHANGES)"
