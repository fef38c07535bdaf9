test "$(git log -1 --format=%s v36)" = 'release 36' && git show v36:CHANGES | tail -1 | grep -qx 'release 36' && test -z "$(git status --porcelain -- CHANGES)"
