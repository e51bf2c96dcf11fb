"""Are more processes faster?"""
