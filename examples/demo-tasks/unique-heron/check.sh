test "$(cat unique.txt)" = 'amber
delta
ember
fjord
grove
heron
islet
jade
kelp
larch
north
olive
pearl
quartz
river
tulip'
