"""Tests whose bodies are run by real ranks (`support.rank_server`)."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any


def on_ranks(world: int = 0) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Lets each of n ranks run a test's body; without a number the test's argument `world` is it.

    Arguments travel as JSON. An assertion that fails on a rank fails the test.
    """

    def decorate(job: Callable[..., None]) -> Callable[..., None]:
        def test(ranks: Callable[..., list[Any]], **values: Any) -> None:
            file = Path(job.__code__.co_filename).stem
            ranks(world or values.pop("world"), f"{file}.{job.__name__}", **values)

        names = ["ranks", *["world"] * (not world), *inspect.signature(job).parameters]
        kind = inspect.Parameter.KEYWORD_ONLY
        test.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in names])
        test.__name__, test.__doc__, test.__module__ = job.__name__, job.__doc__, job.__module__
        test.job = job
        return test

    return decorate
