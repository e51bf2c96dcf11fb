"""How does a run begin, go on and end?"""
