"""Cached properties of frozen records, all computed on construction.

Python 3.11 computes a `cached_property` under a lock, which torch.compile cannot trace. Of a record whose
properties are computed when it is made, the compiler only sees attributes.
"""

from functools import cached_property


def compute_all(instance: object) -> None:
    """Compute every `cached_property` of an object's class."""
    for name, value in vars(type(instance)).items():
        if isinstance(value, cached_property):
            getattr(instance, name)
