"""What did a format do to a tensor?"""
