"""Python files of other tools: written, and parsed without being executed.

A reader sees literals, names and calls (`Call`), and refuses the rest. A call is compared with the calls that
the tool's table writes, after both have every argument that its signature has a default for. So a class or an
argument that no table knows is refused by name.
"""

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from narrowgauge.exchange.table import Layers, Reading
from narrowgauge.quantization import Cast
from narrowgauge.system.errors import UserError, unknown

#: The parameters of each class or function in order, with their defaults; None without one.
Signatures = Mapping[str, Mapping[str, ast.expr | None]]
_PYTHON = '''\
import math
from fnmatch import fnmatchcase

import torch
{imports}
{made}

# Layers that stay in {compute}: names or patterns, compared with a layer's whole name and with its last part;
# and blocks from both ends of the model, where a float is a share of them, rounded up. Blocks are the members
# of ModuleLists that lie in no other block.
MODULES = {modules}
FIRST_BLOCKS = {first}
LAST_BLOCKS = {last}


def is_wide(name, block, blocks):
    """Whether the layer called `name`, in block number `block` (or None) of `blocks`, stays wide."""

    def count(requested):
        return requested if isinstance(requested, int) else math.ceil(round(requested * blocks, 6))

    last_part = name.rpartition(".")[2]
    if any(fnmatchcase(name, p) or fnmatchcase(last_part, p) for p in MODULES):
        return True
    return block is not None and (block < count(FIRST_BLOCKS) or block >= blocks - count(LAST_BLOCKS))


def wide_layers(model):
    """The names of a model's modules that stay wide."""
    blocks = []

    def block_of(name):
        return next((i for i, block in enumerate(blocks) if f"{{name}}.".startswith(f"{{block}}.")), None)

    for name, module in model.named_modules():
        is_list = isinstance(module, torch.nn.ModuleList) and "expert" not in name.rpartition(".")[2].lower()
        if is_list and block_of(name) is None and any(list(member.children()) for member in module):
            blocks += [f"{{name}}.{{i}}".lstrip(".") for i in range(len(module))]
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    return {{name for name in names if is_wide(name, block_of(name), len(blocks))}}
'''


def python_text(compute: str, layers: Layers, imports: str, made: str) -> str:
    """A Python file that makes something, and selects the layers that stay wide (`PythonFile.reading`)."""
    _, modules, first, last = layers
    return _PYTHON.format(
        imports=imports, made=made, compute=compute, modules=list(modules), first=first, last=last
    )


@dataclass(frozen=True, slots=True)
class Call:
    """A call in a file: its name, and all its arguments as literals, dotted names or other calls."""

    name: str
    arguments: Mapping[str, Any]
    line: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A line of a tool's table: a call in its Python, and what that means."""

    text: str
    casts: Mapping[str, Cast]  # in each place that may have it
    above: Mapping[str, str] = field(default_factory=dict)  # its names in a tool that passes it on

    @property
    def name(self) -> str:
        """What is called."""
        return self.text.partition("(")[0]


def signatures(text: str) -> dict[str, dict[str, ast.expr | None]]:
    """Signatures from calls, in which a keyword is a parameter with its default and a name one without."""
    calls = [node for statement in ast.parse(text).body for node in ast.iter_child_nodes(statement)]
    return {
        _dotted(call.func): {
            **dict.fromkeys(map(_dotted, call.args)),
            **{str(k.arg): k.value for k in call.keywords},
        }
        for call in calls
        if isinstance(call, ast.Call)
    }


class PythonFile:
    """The text of a Python file, parsed; `signatures` are of the tool's classes and functions."""

    def __init__(self, text: str, signatures: Signatures) -> None:
        try:
            body = ast.parse(text).body
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            raise UserError(f"it is not Python: {error}; name the file that holds the recipe") from None
        self.signatures = signatures
        self.functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
        self.values = {  # what names are assigned to at its top level
            target.id: node.value
            for node in body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }

    def reading(self, casts: Mapping[str, Cast], lost: Sequence[str], gather: str = "") -> Reading:
        """Casts for the layers that the file selects, where it does so as `python_text` does."""
        names = ("MODULES", "FIRST_BLOCKS", "LAST_BLOCKS")
        modules, first, last = (_literal(self.values.get(name, ast.Constant(0))) for name in names)
        is_list = not modules or (isinstance(modules, list) and all(isinstance(m, str) for m in modules))
        if not is_list or not {type(first), type(last)} <= {int, float}:
            raise UserError(
                f"{names[0]} is a list of names, {names[1]} and {names[2]} numbers; write them so"
            )
        if names[0] not in self.values:
            lost = [*lost, "which layers are narrow: the file leaves it to its user; add a [keep]"]
        layers = Layers((), tuple(modules or ()), first, last)
        return Reading(casts=casts, layers=layers, gather=gather, lost=lost)

    def call(self, node: ast.expr) -> Call:
        """An expression as a call with all arguments."""
        try:
            return call_of(node, self.signatures)
        except UserError as error:
            raise UserError(f"line {node.lineno}: {error}") from None

    def made(self, thing: str, *names: str) -> Call:
        """The one call of these names that is assigned to something at the top level, or returned."""
        inside = (node for function in self.functions.values() for node in ast.walk(function))
        returned = (node.value for node in inside if isinstance(node, ast.Return))
        found = [
            value
            for value in (*self.values.values(), *returned)
            if isinstance(value, ast.Call) and _dotted(value.func).rpartition(".")[2] in names
        ]
        if len(found) != 1:
            raise UserError(
                f"it makes {len(found)} {thing}; name a file that makes one of {', '.join(names)}"
            )
        return self.call(found[0])

    def entry(self, call: object, entries: Iterable[Entry], ignored: Sequence[str] = ()) -> Entry:
        """The entry of a table that a call is, but for some arguments."""
        if not isinstance(call, Call):
            raise UserError(f"{call!r} stands where a class is called; write the call out")

        def differing(entry: Entry) -> list[str]:
            row = call_of(entry.text, self.signatures).arguments
            return [key for key, v in call.arguments.items() if key not in ignored and v != row.get(key)]

        nearest = min(entries, key=lambda entry: (entry.name != call.name, len(differing(entry))))
        keys = differing(nearest)
        if keys or nearest.name != call.name:
            said = ", ".join(f"{key} = {call.arguments[key]!r}" for key in keys) or "no arguments"
            raise UserError(
                f"line {call.line}: {call.name} with {said} is not supported; change it to "
                f"{' '.join(nearest.text.split())}"
            )
        return nearest


def call_of(node: ast.expr | str, signatures: Signatures) -> Call:
    """An expression, or its text, as a call with all arguments."""
    if isinstance(node, str):
        node = ast.parse(node, mode="eval").body
    if not isinstance(node, ast.Call):
        raise UserError(f"{ast.unparse(node)} is not a call of {' or '.join(signatures)}")
    name = _dotted(node.func).rpartition(".")[2]
    if name not in signatures:
        raise unknown("class or function", name, signatures)
    parameters = signatures[name]
    if len(node.args) > len(parameters):
        raise UserError(f"{name} has {len(parameters)} arguments, and {len(node.args)} are given")
    given = dict(zip(parameters, node.args, strict=False))
    for keyword in node.keywords:
        key = keyword.arg or "**"
        if key not in parameters:
            raise unknown(f"argument of {name}", key, parameters)
        given[key] = keyword.value
    nodes = sorted({**parameters, **given}.items())
    arguments = {key: _value(value, signatures) for key, value in nodes if value is not None}
    return Call(name, arguments, node.lineno)


def _value(node: ast.expr, signatures: Signatures) -> Any:
    """A literal; a call; or the last two parts of a dotted name, such as "Format.HYBRID"."""
    if isinstance(node, ast.Call):
        return call_of(node, signatures)
    if isinstance(node, ast.Name | ast.Attribute):
        return ".".join(_dotted(node).split(".")[-2:])
    return _literal(node)


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):  # also for nests too deep
        raise UserError(f"{ast.unparse(node)} is not a literal; write its value out") from None


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""
