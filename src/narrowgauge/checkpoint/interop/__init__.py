"""How do models of other programs look on disk?"""
