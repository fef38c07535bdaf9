def distinct(values):
    """The distinct of the values."""
    return len(values)
