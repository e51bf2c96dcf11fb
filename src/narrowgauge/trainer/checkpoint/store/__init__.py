"""A run's own checkpoints: written, published and read back."""
