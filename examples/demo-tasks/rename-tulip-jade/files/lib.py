def tulip_jade(x):
    return x * 4
