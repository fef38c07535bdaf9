from lib import tulip_jade

print(tulip_jade(4))
