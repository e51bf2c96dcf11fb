"""What is a collective for? Said by whoever starts it, for those who count bytes (`distributed.traffic`).

"gather" (weights), "reduce" (gradients), "activations", "amax" (agreement on scales); what is not said is "".
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_PURPOSE: ContextVar[str] = ContextVar("purpose", default="")


@contextmanager
def comm_tag(current_comm_tag: str) -> Iterator[None]:
    """Collectives within are for this."""
    token = _PURPOSE.set(current_comm_tag)
    try:
        yield
    finally:
        _PURPOSE.reset(token)


def current_comm_tag() -> str:
    """What collectives are for at this moment."""
    return _PURPOSE.get()
