from lib import ember_amber

print(ember_amber(7))
