"""Reads users' TOML with errors that show how to fix it, and writes values as TOML.

The standard library reads TOML but does not write it. Its errors name a grammar rule and a column. For the
most common mistakes this file quotes the line and shows what to write instead.
"""

import json
import math
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from narrowgauge.system.errors import UserError

# Mistakes by a pattern of the line; the first match wins.
_MISTAKES = {
    r"[\w.-]+\s*:(\s|$)": "it is YAML; TOML has [section] above its keys, and = between a key and its value",
    r"[\w.\"'-]+\s*=\s*(None|null|nil)\b": "TOML has no such value; leave the key out",
    r"[\w.\"'-]+\s*=\s*(True|False)\b": "write true or false in small letters",
    r"[\w.\"'-]+\s*=\s*[-+]?\d+(,\d+)+\s*$": "a number has no commas; write it as 1000 or 1_000",
    r"[\w.\"'-]+\s*=\s*[A-Za-z_./~]": 'write text in quotes, as in name = "mxfp4"',
}


def parse_toml(text: str, thing: str) -> dict[str, Any]:
    """Parse a user's TOML; `thing` names the file in errors."""
    text = text.removeprefix("\ufeff")  # the byte order mark of Windows editors
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{thing} is not valid TOML: {error}{_advice(text, str(error))}") from None


def _advice(text: str, error: str) -> str:
    """The line of an error, and what to write instead."""
    if text.lstrip().startswith("{"):
        return "; it is JSON; TOML has [training] above the keys of a section, and lines such as steps = 3"
    found, lines = re.search(r"line (\d+)", error), text.rstrip().split("\n")
    line = lines[int(found[1]) - 1 if found else -1].strip()
    shown = line if len(line) <= 80 else f"{line[:77]}..."
    mistakes = (mend for pattern, mend in _MISTAKES.items() if re.match(pattern, line))
    return f", in {shown!r}; {next(mistakes, 'correct that line')}"


def toml_key(key: str) -> str:
    """A key, quoted where TOML requires it."""
    return key if key.replace("_", "").isalnum() else json.dumps(key)


def toml_value(value: Any) -> str:
    """A value as TOML: text, a number, true or false, or a list or table of them."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{toml_key(k)} = {toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    # Numbers, booleans and strings are the same in TOML and JSON, except that TOML refuses two things that
    # JSON writes: escaped surrogate pairs (emoji), and DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_tables(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Tables of values as TOML, in order; keys without a value (None) are left out."""
    lines = []
    for section, table in tables.items():
        lines.append(f"[{section}]")
        lines += [f"{toml_key(k)} = {toml_value(v)}" for k, v in table.items() if v is not None]
        lines.append("")
    return "\n".join(lines)
