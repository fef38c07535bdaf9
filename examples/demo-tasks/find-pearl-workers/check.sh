test "$(tr -d "[:space:]" < answer.txt)" = "6960"
