birch py
