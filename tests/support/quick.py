"""Which parametrizations a commit waits for; the others are slow tests (`make test-slow`)."""

from collections.abc import Iterable
from typing import Any

import pytest


def quick(values: Iterable[Any], *first: Any) -> list[Any]:
    """The values as parameters; those that are not among `first` are slow tests."""
    all_values = list(values)
    assert set(first) <= set(all_values), f"{set(first) - set(all_values)} are no parameters"
    slow = pytest.mark.slow
    return [
        v if v in first else pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=slow)
        for v in all_values
    ]
