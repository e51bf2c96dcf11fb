"""When values are computed: names of a package on first use (PEP 562), cached properties on construction.

torch takes seconds to import, and on a broken machine it does not import at all. The command must respond
before that: to signals, to a typo, for a table of formats, in the doctor. So packages do not import the
modules of the names that they re-export. Each states them once, as imports for type checkers:

    if TYPE_CHECKING:
        from package.module import name as name
    else:
        __all__, __getattr__, __dir__ = import_on_use(__name__)

Type checkers do not see the `__getattr__`, so they still report a name that is not listed.

Python 3.11 computes a `cached_property` under a lock, which torch.compile cannot trace. Of a frozen record
whose properties are computed when it is made, the compiler only sees attributes.
"""

import ast
import sys
from collections.abc import Callable
from functools import cached_property
from importlib import import_module
from types import ModuleType
from typing import Any


def import_on_use(package: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """The `__all__`, `__getattr__` and `__dir__` of the package `__name__` that is being imported.

    `__getattr__` imports the module of a name and returns its value, which the package then keeps.
    """
    homes = _stated(package)

    class Package(ModuleType):
        """A package whose names shadow its modules: `quantize` is the function, not `quantize.py`."""

        def __setattr__(self, name: str, value: Any) -> None:
            if name not in homes or not isinstance(value, ModuleType):  # importing a module sets its name
                super().__setattr__(name, value)

    def value_of(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    sys.modules[package].__class__ = Package
    return sorted(homes), value_of, lambda: sorted({*vars(sys.modules[package]), *homes})


def _stated(package: str) -> dict[str, str]:
    """The module of each name that a package's source imports under TYPE_CHECKING."""
    spec: Any = sys.modules[package].__spec__
    blocks = [node for node in ast.parse(spec.loader.get_source(package)).body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def compute_all(instance: object) -> None:
    """Compute every `cached_property` of an object's class."""
    for name, value in vars(type(instance)).items():
        if isinstance(value, cached_property):
            getattr(instance, name)
