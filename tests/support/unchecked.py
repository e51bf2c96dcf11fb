"""Records whatever their rules say: copies with other values, and casts with a key that is new."""

import dataclasses

from narrowgauge.quantization import Cast
from narrowgauge.quantization.keys import Consumer


def unchecked(record, **changes):
    """A copy of a frozen record with other fields."""
    made = object.__new__(type(record))
    for field in dataclasses.fields(record):
        object.__setattr__(made, field.name, changes.get(field.name, getattr(record, field.name)))
    return made


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Tomorrow(Cast):
    """Casts with a key that is declared for no consumer."""

    unheard: int = 0
    unsupported = dict.fromkeys(Consumer, ("unheard",))

    @classmethod
    def defaults(cls):
        return {**Cast.defaults(), "unheard": 0}


def tomorrow(c: Cast) -> Tomorrow:
    return Tomorrow(name=c.name, **c.values(), unheard=1)
