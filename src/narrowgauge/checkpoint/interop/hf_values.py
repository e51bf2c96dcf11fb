"""Reads values of a `config.json`; each error names the file and the key."""

from collections.abc import Mapping
from typing import Any

from narrowgauge.errors import UserError


def require(values: Mapping[str, Any], key: str, allowed: tuple[Any, ...], where: str) -> None:
    """Refuse a value that is not one of `allowed`, the first of which is the default."""
    if (found := values.get(key, allowed[0])) not in allowed:
        raise UserError(
            f"{where}: {key} = {found!r}, and only {allowed[0]!r} is computed here; give a model without it"
        )


def needed(values: Mapping[str, Any], key: str, where: str) -> Any:
    """A value without a default; `where` begins the error message."""
    if key not in values:
        raise UserError(f"{where} has no {key!r}, which every model of its kind has; fetch the folder again")
    return values[key]


def number(value: Any) -> Any:
    """An integer as a float; anything else unchanged, for `ModelConfig` to validate."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
