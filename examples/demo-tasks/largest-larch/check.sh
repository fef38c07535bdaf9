test "$(tr -d "[:space:]" < largest.txt)" = "larch.dat"
