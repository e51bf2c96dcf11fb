"""The order of the samples, and batches of them."""
