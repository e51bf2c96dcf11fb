"""Runs in this process, each trained once."""

from support.in_process import trained

__all__ = ["trained"]
