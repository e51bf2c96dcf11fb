"""Preparation: from documents to token files."""
