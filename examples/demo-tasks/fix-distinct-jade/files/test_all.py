from jade import distinct

assert distinct([48, 27, 42, 6, 1, 39, 48]) == 6, distinct([48, 27, 42, 6, 1, 39, 48])
print('passed')
