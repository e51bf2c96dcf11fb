"""Divides the model and the batch over ranks."""
