"""Which settings are there, and which values are refused?"""
