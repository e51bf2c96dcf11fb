"""A property computed once per object: `functools.cached_property` without its lock.

Python 3.11 computes a `cached_property` under a lock, which torch.compile cannot trace. The value is a pure
function of a frozen record, so it does no harm if two threads compute it at the same time. A record that
compiled code reads computes all of them on construction (`compute_all`), so that the compiler only sees
attributes.
"""

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class computed_once(Generic[T]):
    """Decorates a method without arguments; its value becomes an attribute of the object."""

    def __init__(self, function: Callable[[Any], T]) -> None:
        self.function, self.__doc__ = function, function.__doc__
        self.name = function.__name__

    @overload
    def __get__(self, instance: None, owner: type) -> "computed_once[T]": ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> "computed_once[T] | T":
        if instance is None:
            return self
        value = self.function(instance)
        object.__setattr__(instance, self.name, value)
        return value


def compute_all(instance: object) -> None:
    """Compute every `computed_once` of an object's class."""
    for name, value in vars(type(instance)).items():
        if isinstance(value, computed_once):
            getattr(instance, name)
