test "$(tr -d "[:space:]" < answer.txt)" = "8148"
