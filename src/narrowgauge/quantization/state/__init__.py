"""What lives across steps in low precision?"""
