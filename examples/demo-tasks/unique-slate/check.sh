test "$(cat unique.txt)" = 'amber
birch
cedar
ember
fjord
grove
islet
jade
kelp
larch
maple
north
olive
pearl
river
slate
tulip'
