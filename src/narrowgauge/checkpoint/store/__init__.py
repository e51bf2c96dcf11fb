"""How are a run's own checkpoints written, published and read back?"""
