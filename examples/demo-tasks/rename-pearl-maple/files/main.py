from lib import pearl_maple

print(pearl_maple(4))
