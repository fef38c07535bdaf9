amber
