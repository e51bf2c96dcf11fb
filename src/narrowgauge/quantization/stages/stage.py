"""The base of a stage: the keys of a cast that belong together, as a record with its rules."""

from collections.abc import Mapping
from typing import Any, ClassVar

#: (key, whether its value is right, the rule) of each key that is bounded or must fit others.
Rules = list[tuple[str, bool, str]]
#: What an error calls the value of a key that takes a name: its attribute, and the names that exist.
Names = Mapping[str, tuple[str, tuple[str | None, ...]]]


class Stage:
    """Some keys of a cast that belong together; a cast without the stage has its defaults.

    Attributes:
        KEYS: The attribute for each key of a recipe's table.
        NAMES: The keys that take a name.
    """

    __slots__ = ()
    KEYS: ClassVar[Mapping[str, str]] = {}
    NAMES: ClassVar[Names] = {}

    def values(self) -> dict[str, Any]:
        """The value of each key."""
        return {key: getattr(self, attribute) for key, attribute in self.KEYS.items()}

    def rules(self) -> Rules:
        """The rules that mention only the stage's own keys; `cast_rules` relates it to others."""
        return []


class Transform(Stage):
    """A stage that changes a tensor before its blocks get scales (`quantization.transforms`)."""

    __slots__ = ()
