test "$(tr -d "[:space:]" < answer.txt)" = "7358"
