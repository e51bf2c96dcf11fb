"""How do ranks meet, take decisions and end together?"""
