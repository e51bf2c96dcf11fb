"""The exceptions that are meant for users.

A `UserError` is one sentence: what is wrong, the rule, and the way out; only public functions list it. The
command prints it without a traceback and exits with code 2. Broken internal invariants are `assert`s instead.
"""

import signal
import typing
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import cache, wraps
from inspect import signature
from types import UnionType
from typing import Any, ClassVar, ParamSpec, TypeVar

EXIT_FAILED, EXIT_USAGE, EXIT_PREEMPTED = 1, 2, 75  # the last: it was stopped, has saved, and can continue
P = ParamSpec("P")
T = TypeVar("T")
# What else may stand for a number; a TypedDict of keywords is checked by its reader.
_ALLOWED: dict[Any, Any] = dict.fromkeys((int, bool), typing.SupportsIndex)
_ALLOWED |= {float: typing.SupportsFloat, typing.Unpack: object, Any: object}


class UserError(ValueError):
    """A mistake in usage or input: one sentence for the user, exit code 2."""

    exit_code: ClassVar[int] = EXIT_USAGE  # 1 for subclasses that the user did not cause


class Failed(Exception):
    """A run failed although its command line was correct; the command prints the sentence."""

    code: int = EXIT_FAILED  # the exit code of the command
    is_printed: bool = True  # a process that another one stopped may not print the sentence


class ProcessFailed(Exception):
    """A process that the command started has failed; if it exited by itself, it has printed why.

    `code` is its exit code, negative if a signal killed it.
    """

    def __init__(self, process: str, code: int, way_out: str = "") -> None:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        super().__init__(f"{process} {how}{way_out}")
        self.code = code


def unknown(kind: str, name: str, known: Iterable[str], *listed: str) -> UserError:
    """The error for an unknown name, with the nearest known one; `listed` are further words for the list.

    >>> str(unknown("recipe", "mxpf4", ["mxfp4", "bf16"]))
    "unknown recipe 'mxpf4'; the nearest is 'mxfp4' (known: mxfp4, bf16)"
    """
    names = list(known)
    near = nearest(str(name), names)  # from Python, anything may come as a name
    hint = f"; the nearest is {near!r}" if near else ""
    known_names = f" (known: {', '.join([*names, *listed])})" if len(names) <= 40 else ""
    return UserError(f"unknown {kind} {name!r}{hint}{known_names}")


def require(what: str, value: object, *kinds: type) -> None:
    """Refuse an argument of another type than these."""
    if not isinstance(value, kinds):
        known = " or ".join(kind.__name__.replace("NoneType", "None") for kind in kinds)
        raise UserError(f"{what} is of type {type(value).__name__}: it must be of type {known}")


def checked(function: Callable[P, T]) -> Callable[P, T]:
    """Answer arguments that a public function's signature does not allow, with one sentence.

    The outermost type counts: what a sequence or a mapping holds is checked where it is read.
    """
    form, hints = signature(function), cache(lambda: typing.get_type_hints(function))

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            given = form.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise UserError(f"{function.__name__}: {error}") from None
        for name, value in given.items():
            hint = hints().get(name, Any)
            parts = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, UnionType) else (hint,)
            kinds = [typing.get_origin(part) or part for part in parts]
            if not any(isinstance(value, _ALLOWED.get(k, k)) for k in kinds):
                require(name, value, *kinds)
        return function(*args, **kwargs)

    return call


def words_of(error: Exception) -> str:
    """The operating system's name for an error, and nothing else: the rest may quote the request."""
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).strip(" .")


def ending_with(name: str, known: Iterable[str]) -> str:
    """The one known name that ends with `name`; `name` itself where it is known, or none or several do.

    >>> ending_with("4090", ["rtx4090", "a100", "h100"]), ending_with("100", ["rtx4090", "a100", "h100"])
    ('rtx4090', '100')
    """
    names = list(known)
    found = [name] if name in names else [one for one in names if name and one.endswith(name.lower())]
    return found[0] if len(found) == 1 else name


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most similar to `name`, or None where none is similar.

    Ignores case and the dashes before an option, which all options share.
    >>> nearest("--Stepz", ["--steps", "--seed"]), nearest("--dry-run", ["--decay-fraction"])
    ('--steps', None)
    >>> nearest("gtp2", ["llama3-1b", "gpt2-124m", "gpt2-350m"])
    'gpt2-124m'
    >>> nearest("gpt-2", ["gpt3-13b", "gpt2-124m"])  # the same letters begin a name
    'gpt2-124m'
    """
    word = name.lstrip("-").lower()
    bare = {n.lstrip("-").lower(): n for n in known}
    beginnings = {b[: len(word)]: n for b, n in reversed(bare.items())}  # gtp2, gpt2-124m
    letters = _letters(word)
    if len(letters) > 2 and (begun := [n for b, n in bare.items() if _letters(b).startswith(letters)]):
        return begun[0]
    for names in (bare, beginnings):
        if close := get_close_matches(word, list(names), n=1, cutoff=0.6 if names is bare else 0.75):
            return names[close[0]]
    return None


def _letters(word: str) -> str:
    """A word's letters and digits."""
    return "".join(filter(str.isalnum, word))
