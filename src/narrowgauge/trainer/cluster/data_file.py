"""Reads a TOML file into a pydantic model; the first mistake is one sentence that names its key."""

from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from narrowgauge.system.errors import UserError, unknown
from narrowgauge.system.files import named_text, shipped_names, shipped_text, unknown_name
from narrowgauge.system.toml_text import parse_toml

T = TypeVar("T", bound="Table")
# Pydantic's types of errors in TOML's words
_RULES = {"model_type": "a section", "mapping_type": "a section", "tuple_type": "a list"}
_RULES |= {"bool_type": "true or false", "greater_than_equal": "at least {ge}"}


class Table(BaseModel):
    """A table of a file: an unknown key is an error, since a misspelt one would silently do nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def load_table(model: type[T], kind: str, folder: str, name: str) -> T:
    """The model of a file that ships in a folder of this package, by name, or of another `.toml` file."""
    names = shipped_names(folder)
    if name.endswith(".toml"):
        return read_tables(model, kind, named_text(kind, name, names), name)
    if name not in names:
        raise unknown_name(kind, name, names)
    return read_tables(model, kind, shipped_text(folder, name), f"{name}.toml")


def read_tables(model: type[T], kind: str, text: str, file: str) -> T:
    """The model of a file's text; `kind` and `file` name the file in errors."""
    try:
        return model.model_validate(parse_toml(text, f"{kind} file {file}"))
    except ValidationError as error:
        # An unknown key before a missing one, which may be the same, misspelt.
        first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    where, value = ".".join(map(str, first["loc"])), first["input"]
    if isinstance(cause := first.get("ctx", {}).get("error"), UserError):
        raise UserError(f"{file}: {cause}")
    if first["type"] == "extra_forbidden":
        above = where.removesuffix(str(first["loc"][-1]))
        raise unknown(f"key of {file}", where, [f"{above}{key}" for key in _keys(model, first["loc"][:-1])])
    if first["type"] == "missing":
        raise UserError(f"{file} has no {where}; write it")
    rule = _RULES.get(first["type"], "{msg}").format(
        msg=first["msg"].removeprefix("Input should be "), **first.get("ctx", {})
    )
    raise UserError(f"{file}: {where} is {value!r}, but it must be {rule}")


def _keys(model: type[Table], place: tuple[int | str, ...]) -> list[str]:
    """The keys of the table at a place of a file."""
    kind: Any = model
    for part in place:
        if isinstance(kind, type) and issubclass(kind, Table):
            kind = kind.model_fields[str(part)].annotation
        else:
            kind = next(arg for arg in get_args(kind) if hasattr(arg, "model_fields"))
    return list(kind.model_fields)
