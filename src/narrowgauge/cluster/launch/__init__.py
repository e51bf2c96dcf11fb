"""Which script starts a run on a cluster?"""
