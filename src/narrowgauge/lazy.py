"""Names of a package that are imported when they are first used (PEP 562).

torch takes seconds to import, and on a broken machine it does not import at all. The command has to answer
before that: to signals, to a typo, and with the doctor. So a package on the way there imports no module for
the names that it hands on. It states them twice, under `TYPE_CHECKING` for type checkers and readers, and in
the table that this module takes; a test keeps both equal.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def import_on_use(package: str, modules: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """The `__getattr__` of a package.

    Args:
        package: The name of the package, `__name__`.
        modules: The names that the package hands on, by the module below it that defines them.

    Returns:
        A function of a name, which imports its module and gives its value; the package keeps the value.
    """
    home = {name: module for module, names in modules.items() for name in names}

    def value_of(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{home[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return value_of
