test "$(cat unique.txt)" = 'amber
birch
cedar
ember
grove
islet
jade
kelp
larch
maple
north
olive
pearl
slate
tulip'
