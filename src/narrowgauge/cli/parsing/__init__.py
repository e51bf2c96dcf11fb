"""Parsing of command lines: parsers, shared options, help."""
