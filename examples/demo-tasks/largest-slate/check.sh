test "$(tr -d "[:space:]" < largest.txt)" = "slate.dat"
