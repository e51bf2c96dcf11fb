"""What will a run take?"""
