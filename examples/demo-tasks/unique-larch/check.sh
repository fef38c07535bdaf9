test "$(cat unique.txt)" = 'amber
birch
cedar
ember
fjord
heron
jade
kelp
larch
maple
north
quartz
river
slate
tulip'
