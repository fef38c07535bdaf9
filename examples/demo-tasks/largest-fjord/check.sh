test "$(tr -d "[:space:]" < largest.txt)" = "fjord.dat"
