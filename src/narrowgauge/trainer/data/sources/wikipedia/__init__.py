"""Converts a MediaWiki dump to plain text."""
