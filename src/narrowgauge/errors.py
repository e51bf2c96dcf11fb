"""The exceptions that are meant for people.

A `UserError` is one sentence that names the thing, the rule and the way out. The command line prints it
without a traceback and exits with 2. Broken invariants inside the house are `assert`s, not this.
"""

import signal
from collections.abc import Iterable
from difflib import get_close_matches
from typing import ClassVar


class UserError(ValueError):
    """A mistake in usage or input: one sentence for the user, exit code 2.

    Attributes:
        exit_code: that the command ends with; 1 in the kinds that are no mistake of whoever started it.
    """

    exit_code: ClassVar[int] = 2


class Failed(Exception):
    """The failure of a run, which is no mistake in its line: the command prints the sentence.

    Attributes:
        code: The exit code that the command ends with.
        is_printed: Whether this process prints the sentence; a process that another one stopped may not.
    """

    code: int = 1
    is_printed: bool = True


class ProcessFailed(Exception):
    """A process that the command started has failed; one that ended by itself has printed why.

    Attributes:
        code: Its exit code, negative if a signal killed it.
    """

    def __init__(self, process: str, code: int, way_out: str = "") -> None:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        super().__init__(f"{process} {how}{way_out}")
        self.code = code


def unknown(kind: str, name: str, known: Iterable[str]) -> UserError:
    """The error for a name that does not exist, with the nearest one that does.

    >>> str(unknown("recipe", "mxpf4", ["mxfp4", "bf16"]))
    "unknown recipe 'mxpf4'; the nearest is 'mxfp4' (known: mxfp4, bf16)"
    """
    names = list(known)
    near = nearest(name, names)
    hint = f"; the nearest is {near!r}" if near else ""
    listed = f" (known: {', '.join(names)})" if len(names) <= 40 else ""
    return UserError(f"unknown {kind} {name!r}{hint}{listed}")


def words_of(error: Exception) -> str:
    """The system's name for an error; never more, because the rest may quote what was asked."""
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).strip(" .")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The name that looks most like another one, or None where none looks like it.

    Capitals make no difference, nor do the dashes before an option, which all options share.

    >>> nearest("--Stepz", ["--steps", "--seed"]), nearest("--dry-run", ["--decay-fraction"])
    ('--steps', None)
    """
    bare = {n.lstrip("-").lower(): n for n in known}
    close = get_close_matches(name.lstrip("-").lower(), list(bare), n=1)
    return bare[close[0]] if close else None
