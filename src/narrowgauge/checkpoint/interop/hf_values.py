"""How values of a `config.json` are read: each refusal is a sentence that names the file and the key."""

from collections.abc import Mapping
from typing import Any

from narrowgauge.errors import UserError


def require(values: Mapping[str, Any], key: str, allowed: tuple[Any, ...], where: str) -> None:
    """Refuse another value than one of `allowed`, the first of which is the default."""
    if (found := values.get(key, allowed[0])) not in allowed:
        raise UserError(
            f"{where}: {key} = {found!r}, and only {allowed[0]!r} is computed here; give a model without it"
        )


def needed(values: Mapping[str, Any], key: str, where: str) -> Any:
    """A value without a default; `where` begins the sentence that misses it."""
    if key not in values:
        raise UserError(f"{where} has no {key!r}, which every model of its kind has; fetch the folder again")
    return values[key]


def number(value: Any) -> Any:
    """A whole number as a float; anything else as it is, for `ModelConfig` to judge."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
