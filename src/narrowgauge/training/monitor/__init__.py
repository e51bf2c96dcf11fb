"""What does a run take, and what does it show?"""
