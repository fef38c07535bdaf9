def ember_amber(x):
    return x * 7
