tulip
