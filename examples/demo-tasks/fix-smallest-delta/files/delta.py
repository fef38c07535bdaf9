def smallest(values):
    """The smallest of the values."""
    return sorted(values)[-1]
