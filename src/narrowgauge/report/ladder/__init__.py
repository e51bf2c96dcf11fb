"""How does the gap of each recipe grow with the number of tokens?"""
