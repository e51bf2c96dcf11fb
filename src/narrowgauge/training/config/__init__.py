"""What may be set, and what is refused?"""
