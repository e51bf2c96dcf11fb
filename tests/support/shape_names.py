"""The shapes that names say are the shapes that tensors have: checked at each call, while the tests run.

An argument `x_BTD` is a tensor of three dimensions, and those with the same letter in one call have the same
size. The import hook puts the check around every function of the numeric rooms that has such an argument.
What a compiler traces, and kernels in Triton's language, are left as they are.
"""

import ast
import functools
import re
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

import torch

ROOMS = ("formats", "quantization", "kernels", "recipes", "nn", "models")
SUFFIX = re.compile(r"[a-z0-9]_([A-Z]+)$")


def letters_of(name: str) -> str:
    """The dimensions in a name: "BTD" of `x_BTD`, "" of a name without a legend."""
    match = SUFFIX.search(name)
    return match[1] if match else ""


def room_of(module: str) -> str:
    """The room of a module of the package; "" for the package, and for the folder of the trainer's rooms."""
    return ([part for part in module.split(".")[1:] if part != "trainer"] or [""])[0]


def check_shapes(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, whose tensors must have the shapes that its arguments' names say."""
    code = function.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    places = [(i, name, letters_of(name)) for i, name in enumerate(names) if letters_of(name)]

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            sizes: dict[str, int] = {}
            for i, name, letters in places:
                value = args[i] if i < len(args) else kwargs.get(name)
                if isinstance(value, torch.Tensor):
                    shape, fits = value.shape, len(value.shape) == len(letters)
                    for letter, size in zip(letters, shape, strict=False):
                        fits = fits and sizes.setdefault(letter, size) == size
                    assert fits, (
                        f"{function.__qualname__}: {name} has the shape {tuple(shape)}, where {sizes}"
                    )
        return function(*args, **kwargs)

    return checked


class _Loader(SourceFileLoader):
    """Puts the check around functions as their module is imported."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                if any(letters_of(a.arg) for a in arguments):
                    node.decorator_list.append(ast.Name("_check_shapes", ast.Load()))
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["_check_shapes"] = check_shapes
        super().exec_module(module)


class _Finder(PathFinder):
    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parts = fullname.split(".")
        if parts[0] != "narrowgauge" or room_of(fullname) not in ROOMS or "triton" in parts:
            return None
        spec = super().find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            spec.loader = _Loader(fullname, spec.origin)
        return spec


_imported = [m for m in sys.modules if m.startswith("narrowgauge.") and room_of(m) in ROOMS]
assert not _imported, f"imported before their shapes could be checked: {_imported[:3]}"
sys.meta_path.insert(0, _Finder)
