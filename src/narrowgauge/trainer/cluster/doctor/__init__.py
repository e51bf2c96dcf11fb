"""Finds what is wrong with this machine and how to fix it."""
