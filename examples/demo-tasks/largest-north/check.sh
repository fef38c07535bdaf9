test "$(tr -d "[:space:]" < largest.txt)" = "north.dat"
