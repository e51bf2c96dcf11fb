"""Modules of another project's checkout, for projects that pip does not install without a GPU.

The `__init__` of their packages loads what was compiled for a GPU. Here each package is empty, and only the
modules that compute on a CPU are read.
"""

import os
import sys
from pathlib import Path
from types import ModuleType


def folder(variable: str, inside: str) -> Path:
    """A folder of the checkout that an environment variable names."""
    path = Path(os.environ.get(variable, ""), inside)
    if not os.environ.get(variable) or not path.is_dir():
        raise ImportError(f"{variable} names no checkout that has {inside}; clone one, and set the variable")
    return path


def package(name: str, path: Path | None = None, **contents: object) -> ModuleType:
    """An empty package whose modules are found in a folder; with `contents`, a module that has these."""
    module = ModuleType(name)
    module.__path__ = [str(path)] if path else []
    vars(module).update(contents)
    sys.modules[name] = module
    return module
