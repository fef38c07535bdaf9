from amber import total

assert total([37, 3, 29, 9, 22, 1, 37]) == 138, total([37, 3, 29, 9, 22, 1, 37])
print('passed')
