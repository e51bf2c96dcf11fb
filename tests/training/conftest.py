"""Runs in this process."""

from support.in_process import train, trained, with_trainer

__all__ = ["train", "trained", "with_trainer"]
