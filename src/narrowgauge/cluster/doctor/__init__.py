"""What is wrong with this machine, and what mends it?"""
