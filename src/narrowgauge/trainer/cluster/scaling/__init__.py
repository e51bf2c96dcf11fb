"""Measures whether more processes are faster."""
