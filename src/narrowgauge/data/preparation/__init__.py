"""How do documents become token files?"""
