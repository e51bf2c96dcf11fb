"""How does a run start, resume and end?"""
