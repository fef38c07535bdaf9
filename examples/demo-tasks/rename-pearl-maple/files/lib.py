def pearl_maple(x):
    return x * 4
