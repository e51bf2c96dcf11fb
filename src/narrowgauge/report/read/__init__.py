"""Reads run directories."""
