"""What does a run directory say?"""
