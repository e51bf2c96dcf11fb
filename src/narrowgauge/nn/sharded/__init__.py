"""How does a layer compute when several ranks hold its tensors?"""
