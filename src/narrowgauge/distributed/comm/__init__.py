"""What travels between ranks, in which numbers?"""
