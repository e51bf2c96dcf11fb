"""Which number format is each tensor of a training step in? A `Recipe` says so, and is data.

A linear layer does three matrix multiplications a step, each with two operands. Legend: M tokens, K inputs,
N outputs.

    fprop   x_MK  @ w_NK.T  -> y_MN      places fprop.x,  fprop.w     contracts K
    dgrad   dy_MN @ w_NK    -> dx_MK     places dgrad.dy, dgrad.w     contracts N
    wgrad   dy_MN.T @ x_MK  -> dw_NK     places wgrad.dy, wgrad.x     contracts M

A recipe puts a `Cast` in each of these places, names the format of everything that is not narrow
(`compute`), and says which layers stay out (`keep`). It is read from a TOML file; the ones that ship are
the `.toml` files beside this module, and a user's own file has every freedom they have.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from narrowgauge.errors import UserError, unknown
from narrowgauge.quantization import Cast, make_cast

GEMM_PLACES = ("fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x")
# Places that this version keeps in one format, whatever the recipe.
FIXED_PLACES = {"weight": "fp32", "master": "fp32", "grad": "fp32", "m": "fp32", "v": "fp32"}
PLACES = (*GEMM_PLACES, *FIXED_PLACES)
_ROOT_KEYS = ("name", "title", "source", "compute", "keep", "fprop", "dgrad", "wgrad")
_KEEP_KEYS = ("modules", "last_blocks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A number format for every place.

    Attributes:
        name: what it is called.
        title: one line for people.
        source: paper, specification or library it follows.
        compute: "bf16" or "fp32": GEMM results, and everything a recipe does not narrow.
        casts: the cast of each of the six GEMM places.
        keep_modules: patterns of module names that stay in `compute` ("head" matches a last component).
        keep_last_blocks: share of the model's blocks, from the end, that stay in `compute`.
        text: the TOML it was read from.
    """

    name: str
    title: str
    source: str
    compute: str
    casts: Mapping[str, Cast]
    keep_modules: tuple[str, ...] = ()
    keep_last_blocks: float = 0.0
    text: str = ""

    @property
    def is_narrow(self) -> bool:
        """Whether any GEMM operand is narrower than `compute`."""
        return any(c.name != self.compute for c in self.casts.values())

    def in_high_precision(self) -> "Recipe":
        """The recipe of the layers that are kept out: every place in `compute`."""
        return replace(self, casts=dict.fromkeys(GEMM_PLACES, make_cast(self.compute)))

    def with_places(self, places: Mapping[str, Any]) -> "Recipe":
        """This recipe with other casts in some places, as `--recipe.fprop.x bf16` asks for.

        Raises:
            UserError: unknown place or cast, or a place that this version cannot change.
        """
        casts = dict(self.casts)
        for place, value in places.items():
            if place in FIXED_PLACES:
                if value != FIXED_PLACES[place]:
                    raise UserError(
                        f"recipe place {place!r} = {value!r}: this version keeps it in "
                        f"{FIXED_PLACES[place]}; remove the key, or narrow a GEMM operand ({', '.join(GEMM_PLACES)})"
                    )
            elif place in GEMM_PLACES:
                casts[place] = make_cast(value)
            else:
                raise unknown("recipe place", place, PLACES)
        return replace(self, casts=casts)


def parse_recipe(text: str, where: str) -> Recipe:
    """A recipe from the text of a TOML file; `where` names the file in errors.

    Raises:
        UserError: broken TOML, unknown or missing key, unknown cast.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"recipe {where} is not valid TOML: {error}") from None
    _check_keys(table, _ROOT_KEYS, f"key of recipe {where}")
    keep = table.get("keep", {})
    _check_keys(keep, _KEEP_KEYS, f"[keep] key of recipe {where}")
    compute = table.get("compute", "bf16")
    if compute not in ("bf16", "fp32"):
        raise UserError(f"recipe {where}: compute = {compute!r}, but it must be 'bf16' or 'fp32'")
    base = Recipe(
        name=table.get("name", Path(where).stem),
        title=table.get("title", ""),
        source=table.get("source", ""),
        compute=compute,
        casts=dict.fromkeys(GEMM_PLACES, make_cast(compute)),
        keep_modules=tuple(keep.get("modules", ())),
        keep_last_blocks=float(keep.get("last_blocks", 0.0)),
        text=text,
    )
    if not 0 <= base.keep_last_blocks <= 1:
        raise UserError(
            f"recipe {where}: last_blocks = {base.keep_last_blocks}, but it is a share from 0 to 1"
        )
    places = {f"{g}.{o}": v for g in ("fprop", "dgrad", "wgrad") for o, v in table.get(g, {}).items()}
    return base.with_places(places)


def _check_keys(table: Mapping[str, Any], known: tuple[str, ...], kind: str) -> None:
    for key in table:
        if key not in known:
            raise unknown(kind, key, known)


def load_recipe(path: str | Path) -> Recipe:
    """A recipe from a TOML file of one's own.

    Raises:
        UserError: the file cannot be read or is no recipe.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"recipe file {path} cannot be read: {error}") from None
    return parse_recipe(text, str(path))


# The order in which tables list them: references first, then from wide to narrow.
_SHIPPED = ("fp32", "bf16", "fp8", "mxfp8", "mxfp6-e2m3", "mxfp6-e3m2", "mxfp4", "nvfp4")


def recipe_names() -> list[str]:
    """Names of the recipes that ship."""
    return list(_SHIPPED)


@cache
def _shipped(name: str) -> Recipe:
    file = resources.files(__package__) / f"{name}.toml"
    return parse_recipe(file.read_text(encoding="utf-8"), f"{name}.toml")


def recipe(name: str) -> Recipe:
    """A shipped recipe by name, or one's own by the path of its `.toml` file.

    Raises:
        UserError: neither; the sentence names the nearest recipe.
    """
    if name.endswith(".toml"):
        return load_recipe(name)
    if name not in _SHIPPED:
        raise unknown("recipe", name, _SHIPPED)
    return _shipped(name)
