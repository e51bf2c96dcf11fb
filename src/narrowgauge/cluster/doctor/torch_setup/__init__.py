"""Which torch is here, why does it not import, and which one would?"""
