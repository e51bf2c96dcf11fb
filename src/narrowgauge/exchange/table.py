"""What the modules of tools share: layers, refusals, and files with what is read from them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from narrowgauge.quantization import Cast
from narrowgauge.recipes.describe import cast_keys
from narrowgauge.recipes.places import GEMMS, GROUPS
from narrowgauge.system.errors import UserError
from narrowgauge.system.toml_text import toml_value

#: The places that quantize each tensor, by the name that tools have for it: in its first and its second GEMM.
TENSORS = {
    "input": ("fprop.x", "wgrad.x"),
    "weight": ("fprop.w", "dgrad.w"),
    "grad_output": ("dgrad.dy", "wgrad.dy"),
}
#: The operands of each GEMM.
OF_GEMM = {gemm: GROUPS[gemm] for gemm in GEMMS}
#: torch's and JAX's names of elements.
FLOAT8 = {"e4m3": "float8_e4m3fn", **{e: f"float8_{e}" for e in ("e5m2", "e4m3fnuz", "e5m2fnuz")}}
T = TypeVar("T")


class Layers(NamedTuple):
    """The layers that a file makes narrow: those of some patterns, or all; and those that it keeps wide."""

    only: tuple[str, ...] = ()  # patterns; () for all
    modules: tuple[str, ...] = ()  # patterns of those that stay wide,
    first_blocks: float = 0  # and blocks from both ends of the model, as in `Rule`
    last_blocks: float = 0


@dataclass(frozen=True, slots=True)
class Refusal:
    """One thing that a target cannot express."""

    place: str  # in the recipe, or "" for the recipe as a whole
    key: str  # of the cast in that place, or of the recipe
    why: str  # the value in the recipe, and what the target has

    def __str__(self) -> str:
        where = f"{self.place}: " if self.place not in ("", self.key) else ""
        return f"{where}{self.why}"


def unlike(
    key: str, values: Mapping[str, object], groups: Mapping[str, Sequence[str]], rule: str
) -> list[Refusal]:
    """Refusals of groups whose places need one value; `rule` says so of the target."""
    found = []
    for place, group in groups.items():
        different = dict.fromkeys(values[p] for p in group if p in values)
        if len(different) > 1:
            why = f"{key} = {' and '.join(map(str, different))} in {', '.join(group)}; {rule}"
            found.append(Refusal(place, key, why))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a file of another tool specifies."""

    casts: Mapping[str, Cast]  # of the six places of GEMMs; one that is missing is in the compute format
    layers: Layers
    gather: str = ""  # the name of the cast of weights between devices; "" for the recipe's default
    # What the file specifies, or leaves to its user, and a recipe does not hold; one sentence each.
    lost: Sequence[str] = ()

    def toml(self, words: Mapping[str, str]) -> str:
        """The TOML of a recipe with a name, title and source (`words`), in bf16 where not narrow."""
        casts = {place: _cast_value(c) for place, c in self.casts.items()}
        keep = {key: value for key, value in self.layers._asdict().items() if value}
        rule = {"modules": keep.pop("only"), **casts} if self.layers.only else {}
        tables: dict[str, Mapping[str, Any]] = {"[keep]": keep, "[[rule]]": rule}
        for gemm in () if rule else GEMMS:
            tables[f"[{gemm}]"] = {p.partition(".")[2]: c for p, c in casts.items() if p.startswith(gemm)}
        root = {**words, "compute": "bf16"} | ({"gather": self.gather} if self.gather else {})
        lines = [f"# Lost: {sentence}." for sentence in self.lost]
        for head, table in {"": root, **tables}.items():
            lines += ["", head] if head and table else []
            lines += [f"{key} = {toml_value(value)}" for key, value in table.items()]
        return "\n".join(lines) + "\n"


def _cast_value(c: Cast) -> str | dict[str, Any]:
    """A cast as a recipe writes it: its name, or the table of its keys."""
    name, keys = cast_keys(c)
    return ({"cast": name} if name else {}) | keys if keys else name


def read_file(file: Path, read: Callable[[str], T]) -> T:
    """What a reader makes of a file's text; an error names the file, also one of a form it cannot walk."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None
    try:
        return read(text)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    except (AttributeError, LookupError, TypeError, RecursionError) as error:
        raise UserError(f"{file}: it is not of the form that the tool reads ({error}); correct it") from None


def yaml_documents(text: str) -> list[Any]:
    """The documents of YAML, of plain values only; [None] without any."""
    try:
        import yaml
    except ImportError:
        raise UserError("it is YAML, which needs PyYAML; install it with 'pip install pyyaml'") from None
    try:
        return [document for document in yaml.safe_load_all(text) if document is not None] or [None]
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"it is not YAML: {' '.join(str(error).split())}; correct that line") from None
