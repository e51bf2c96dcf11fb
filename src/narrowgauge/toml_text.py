"""Values as TOML text, which the standard library reads and does not write."""

import json
import math
from collections.abc import Mapping
from typing import Any


def toml_key(key: str) -> str:
    """A key, in quotes where TOML wants them."""
    return key if key.replace("_", "").isalnum() else json.dumps(key)


def toml_value(value: Any) -> str:
    """Text, a number, true or false, or a list or table of them."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{toml_key(k)} = {toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    # Numbers, booleans and strings are alike in TOML and JSON, but TOML refuses two things that JSON writes:
    # an emoji as a pair of escaped surrogates, and DEL as it is.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
