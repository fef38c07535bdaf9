def north_olive(x):
    return x * 8
