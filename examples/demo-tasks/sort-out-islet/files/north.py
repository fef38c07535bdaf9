north
