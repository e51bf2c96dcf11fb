"""What is read from the file of another tool, and the recipe that it becomes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from narrowgauge.quantization import Cast
from narrowgauge.recipes.describe import cast_keys
from narrowgauge.recipes.places import GEMMS
from narrowgauge.system.errors import UserError
from narrowgauge.system.toml_text import toml_value


@dataclass(frozen=True, slots=True)
class Keep:
    """Layers that stay in the compute format, as the [keep] of a recipe names them."""

    modules: tuple[str, ...] = ()
    first_blocks: float = 0
    last_blocks: float = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a file of another tool specifies."""

    casts: Mapping[str, Cast]  # of the six places of GEMMs; one that is missing is in the compute format
    only: tuple[str, ...] = ()  # patterns of the layers that have these casts; none for all layers
    keep: Keep = field(default_factory=Keep)
    gather: str = ""  # the name of the cast of weights between devices; "" for the recipe's default
    # What the file specifies, or leaves to its user, and a recipe does not hold; one sentence each.
    lost: Sequence[str] = ()

    def toml(self, words: Mapping[str, str], compute: str) -> str:
        """The TOML of a recipe with a name, title and source (`words`), in `compute` where not narrow."""
        lines = [f"# Lost: {sentence}." for sentence in self.lost]
        lines += _lines({**words, "compute": compute})
        lines += _lines({"gather": self.gather} if self.gather else {})
        kept = {f: getattr(self.keep, f) for f in ("modules", "first_blocks", "last_blocks")}
        if any(kept.values()):
            lines += ["", "[keep]", *_lines({key: value for key, value in kept.items() if value})]
        casts = {place: cast_value(c) for place, c in self.casts.items()}
        if self.only:
            return "\n".join([*lines, "", "[[rule]]", *_lines({"modules": self.only, **casts})]) + "\n"
        for gemm in GEMMS:
            of_gemm = {p.partition(".")[2]: c for p, c in casts.items() if p.startswith(f"{gemm}.")}
            lines += ["", f"[{gemm}]", *_lines(of_gemm)] if of_gemm else []
        return "\n".join(lines) + "\n"


def _lines(table: Mapping[str, Any]) -> list[str]:
    """The lines of a TOML table."""
    return [f"{k} = {toml_value(list(v) if isinstance(v, tuple) else v)}" for k, v in table.items()]


def cast_value(c: Cast) -> str | dict[str, Any]:
    """A cast as a recipe writes it: its name, or the table of its keys."""
    name, keys = cast_keys(c)
    if not keys:
        return name
    return ({"cast": name} if name else {}) | keys


def read_text(path: Path) -> str:
    """The text of a file."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def yaml_documents(text: str, where: Path | str) -> list[Any]:
    """The documents of YAML, of plain values only."""
    try:
        import yaml
    except ImportError:
        raise UserError(
            f"{where} is YAML, which needs PyYAML; install it with 'pip install pyyaml'"
        ) from None
    try:
        return [document for document in yaml.safe_load_all(text) if document is not None]
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{where} is not YAML: {error}; correct that line") from None
