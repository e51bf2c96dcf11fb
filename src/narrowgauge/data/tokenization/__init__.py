"""How does text become ids?"""
