"""Records whatever their rules say: copies with other values."""

import dataclasses

from narrowgauge.quantization import Cast
from narrowgauge.quantization.cast import _grouped


def unchecked(record, **changes):
    """A copy of a frozen record with other fields."""
    made = object.__new__(type(record))
    for field in dataclasses.fields(record):
        object.__setattr__(made, field.name, changes.get(field.name, getattr(record, field.name)))
    return made


def with_keys(cast: Cast, **keys) -> Cast:
    """A copy of a cast with other flat keys."""
    stages = {f.name: getattr(cast, f.name) for f in dataclasses.fields(cast)}
    return unchecked(cast, **_grouped(type(cast), stages, keys))
