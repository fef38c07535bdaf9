test "$(tr -d "[:space:]" < answer.txt)" = "9568"
