"""The preparation of documents as token files."""
