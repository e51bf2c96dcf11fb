"""How do attention and the residual stream compute under a recipe?"""
