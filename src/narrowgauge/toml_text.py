"""TOML that users write, read with errors that they can mend; and values as TOML text.

The standard library reads TOML and does not write it. Its errors name a rule of the grammar and a column. The
likeliest mistakes are known, so here they get the line as it stands and what to write instead.
"""

import json
import math
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from narrowgauge.errors import UserError

# What is wrong with a line, by a pattern of it; the first that matches answers.
_MISTAKES = {
    r"[\w.-]+\s*:(\s|$)": "it is YAML; TOML has [section] above its keys, and = between a key and its value",
    r"[\w.\"'-]+\s*=\s*(None|null|nil)\b": "TOML has no such value; leave the key out",
    r"[\w.\"'-]+\s*=\s*(True|False)\b": "write true or false in small letters",
    r"[\w.\"'-]+\s*=\s*[-+]?\d+(,\d+)+\s*$": "a number has no commas; write it as 1000 or 1_000",
    r"[\w.\"'-]+\s*=\s*[A-Za-z_./~]": 'write text in quotes, as in name = "mxfp4"',
}


def parse_toml(text: str, thing: str) -> dict[str, Any]:
    """Read the TOML of a user's file; `thing` names the file in errors.

    Raises:
        UserError: It is not TOML. The sentence has the line and, for the likeliest mistakes, the way out.
    """
    text = text.removeprefix("\ufeff")  # a mark that editors on Windows write
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
