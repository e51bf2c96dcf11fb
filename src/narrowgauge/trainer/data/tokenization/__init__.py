"""Tokenization: from text to ids and back."""
