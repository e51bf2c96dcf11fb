"""What would one of N ranks do?"""
