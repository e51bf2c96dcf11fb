"""Loading: the order of samples, and batches of them."""
