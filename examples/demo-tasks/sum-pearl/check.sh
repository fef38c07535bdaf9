test "$(tr -d "[:space:]" < total.txt)" = "21"
