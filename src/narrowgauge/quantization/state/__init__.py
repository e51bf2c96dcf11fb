"""What lives across steps in narrow numbers?"""
