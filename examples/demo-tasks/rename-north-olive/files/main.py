from lib import north_olive

print(north_olive(8))
