"""Who is this process among the ranks?"""
