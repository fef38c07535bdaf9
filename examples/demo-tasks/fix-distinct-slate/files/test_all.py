from slate import distinct

assert distinct([32, 17, 46, 31, 14, 22, 32]) == 6, distinct([32, 17, 46, 31, 14, 22, 32])
print('passed')
