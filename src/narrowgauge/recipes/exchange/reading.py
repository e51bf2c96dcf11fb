"""What is read from the file of another tool: casts, the layers that stay wide, and what was lost.

Python files are parsed and never executed: a reader sees literals, names and calls (`Call`), and refuses the
rest. A call is compared with the calls that this tool's table writes, after both have every argument that its
signature has a default for. So a class or an argument that no table knows is refused by name.
"""

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from narrowgauge.errors import UserError, unknown
from narrowgauge.quantization import Cast


@dataclass(frozen=True, slots=True)
class Keep:
    """Layers that stay in the compute format, as the [keep] of a recipe names them."""

    modules: tuple[str, ...] = ()
    first_blocks: float = 0
    last_blocks: float = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a file of another tool specifies.

    Attributes:
        casts: The casts of the six places of GEMMs; one that is missing is in the compute format.
        only: Patterns of the layers that have these casts; none for all layers.
        keep: The layers that stay in the compute format.
        gather: The name of the cast of weights between devices; "" for the recipe's default.
        lost: What the file specifies, or leaves to its user, and a recipe does not hold; one sentence each.
    """

    casts: Mapping[str, Cast]
    only: tuple[str, ...] = ()
    keep: Keep = field(default_factory=Keep)
    gather: str = ""
    lost: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Call:
    """A call in a file: its name, and all its arguments as literals, dotted names or other calls."""

    name: str
    arguments: Mapping[str, Any]


#: The parameters of each class or function of a tool in order, with their defaults as Python ("" for none).
Signatures = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class PythonFile:
    """The statements of a Python file, parsed.

    Attributes:
        path: The file.
        values: The expressions that names are assigned to at its top level.
        functions: Its functions.
        signatures: The parameters of the tool's own classes and functions.
    """

    path: Path
    values: Mapping[str, ast.expr]
    functions: Mapping[str, ast.FunctionDef]
    signatures: Signatures

    def literal(self, name: str, default: Any) -> Any:
        """The literal that a name is assigned to.

        Raises:
            UserError: It is assigned to something else.
        """
        if name not in self.values:
            return default
        try:
            return ast.literal_eval(self.values[name])
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            raise UserError(f"{self.path}: {name} is not a literal; write its value out") from None

    def keep(self) -> Keep:
        """The layers that stay wide, where the file is of the form that `layers.selection` writes."""
        modules = self.literal("MODULES", [])
        first, last = self.literal("FIRST_BLOCKS", 0), self.literal("LAST_BLOCKS", 0)
        if not (isinstance(modules, list) and all(isinstance(m, str) for m in modules)):
            raise UserError(f"{self.path}: MODULES is not a list of names; write it as one")
        for name, count in (("FIRST_BLOCKS", first), ("LAST_BLOCKS", last)):
            if isinstance(count, bool) or not isinstance(count, int | float):
                raise UserError(f"{self.path}: {name} is not a number; write it as one")
        return Keep(tuple(modules), first, last)

    @property
    def lost(self) -> list[str]:
        """What the file leaves to the code that uses it."""
        is_ours = "MODULES" in self.values
        return [] if is_ours else ["which layers are narrow: the file leaves it to its user; add a [keep]"]

    def call(self, node: ast.expr) -> Call:
        """An expression as a call with all arguments.

        Raises:
            UserError: It is not a call, or calls something that is not in the signatures.
        """
        try:
            return call_of(node, self.signatures)
        except UserError as error:
            raise UserError(f"{self.path}, line {node.lineno}: {error}") from None

    def calls(self, *names: str) -> Iterator[ast.expr]:
        """The calls of these names that are assigned to something at the top level, or returned."""
        returned = (
            node.value
            for function in self.functions.values()
            for node in ast.walk(function)
            if isinstance(node, ast.Return) and node.value is not None
        )
        for value in (*self.values.values(), *returned):
            if isinstance(value, ast.Call) and _dotted(value.func).rpartition(".")[2] in names:
                yield value


def python_file(path: Path, signatures: Signatures) -> PythonFile:
    """Parse a Python file without executing it.

    Raises:
        UserError: The file cannot be read, or is not Python.
    """
    try:
        tree = ast.parse(read_text(path))
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise UserError(f"{path} is not Python: {error}; name the file that holds the recipe") from None
    values = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    return PythonFile(path, values, functions, signatures)


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        UserError: The file cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def call_of(node: ast.expr | str, signatures: Signatures) -> Call:
    """An expression, or its text, as a call with all arguments.

    Raises:
        UserError: It is not a call, or calls something that is not in the signatures.
    """
    if isinstance(node, str):
        node = ast.parse(node, mode="eval").body
    if not isinstance(node, ast.Call):
        raise UserError(f"{ast.unparse(node)} is not a call of {' or '.join(signatures)}")
    name = _dotted(node.func).rpartition(".")[2]
    if name not in signatures:
        raise unknown("class or function", name, signatures)
    parameters = signatures[name]
    given = dict(zip(parameters, node.args, strict=False))
    if len(node.args) > len(parameters):
        raise UserError(f"{name} has {len(parameters)} arguments, and {len(node.args)} are given")
    for keyword in node.keywords:
        key = keyword.arg or "**"
        if key not in parameters:
            raise unknown(f"argument of {name}", key, parameters)
        given[key] = keyword.value
    defaults = {key: ast.parse(text, mode="eval").body for key, text in parameters.items() if text}
    arguments = {key: _value(value, signatures) for key, value in (defaults | given).items()}
    return Call(name, dict(sorted(arguments.items())))


def _value(node: ast.expr, signatures: Signatures) -> Any:
    """A literal; a call; or the last two parts of a dotted name, such as "Format.HYBRID"."""
    if isinstance(node, ast.Call):
        return call_of(node, signatures)
    if isinstance(node, ast.Name | ast.Attribute):
        return ".".join(_dotted(node).split(".")[-2:])
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise UserError(f"{ast.unparse(node)} is not a literal; write its value out") from None


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def yaml_documents(path: Path) -> list[Any]:
    """The documents of a YAML file, of plain values only.

    Raises:
        UserError: PyYAML is not installed, the file cannot be read, or it is not YAML.
    """
    try:
        import yaml
    except ImportError:
        raise UserError(f"{path} is YAML, which needs PyYAML; install it with 'pip install pyyaml'") from None
    text = read_text(path)
    try:
        return [document for document in yaml.safe_load_all(text) if document is not None]
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not YAML: {error}; correct that line") from None


#: A reader of a tool's file; its second argument is how many blocks the model has, if that is known.
Reader = Callable[[Path, "int | None"], Reading]
