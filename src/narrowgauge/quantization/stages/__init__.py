"""The stages of a cast: each file holds one stage, and its rules, and here is their base."""

from collections.abc import Mapping
from typing import Any, ClassVar

#: (key, whether its value is valid, the rule) for each key that is bounded or depends on others.
Rules = list[tuple[str, bool, str]]
#: For a key that takes a name: what errors call its values, and the known names.
Names = Mapping[str, tuple[str, tuple[str | None, ...]]]


class Stage:
    """Related keys of a cast; a cast without the stage has its defaults.

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
        """The rules that involve only this stage's keys; `cast_rules` relates them to others."""
        return []


class Transform(Stage):
    """A stage that changes a tensor before its blocks get scales (`quantization.transforms`)."""

    __slots__ = ()
