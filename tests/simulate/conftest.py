"""The fixture `train`: runs in this process."""

from support.in_process import train

__all__ = ["train"]
