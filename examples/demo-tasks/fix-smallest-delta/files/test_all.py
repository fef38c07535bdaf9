from delta import smallest

assert smallest([13, 25, 50, 50, 32, 8, 13]) == 8, smallest([13, 25, 50, 50, 32, 8, 13])
print('passed')
