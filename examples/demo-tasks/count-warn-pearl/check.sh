test "$(tr -d "[:space:]" < count.txt)" = "8"
