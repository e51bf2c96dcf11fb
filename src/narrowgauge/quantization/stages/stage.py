"""The base of a stage: a record of some keys of a cast, at their defaults in a cast without it."""

from collections.abc import Mapping
from typing import Any, ClassVar

#: (key, whether its value is right, the rule) of each key that is bounded or must fit others.
Rules = list[tuple[str, bool, str]]


class Stage:
    """Some keys of a cast that belong together.

    Attributes:
        KEYS: The attribute that each key of a recipe's table is, in the order in which casts are written.
    """

    __slots__ = ()
    KEYS: ClassVar[Mapping[str, str]] = {}

    def values(self) -> dict[str, Any]:
        """The value of each key."""
        return {key: getattr(self, attribute) for key, attribute in self.KEYS.items()}

    def rules(self, cast: Any) -> Rules:
        """The rules of its keys, in a cast that has it."""
        raise NotImplementedError


class Transform(Stage):
    """A stage that changes a tensor before its blocks get scales (`quantization.transforms`)."""

    __slots__ = ()
