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
_GEMMS = ("fprop", "dgrad", "wgrad")
_ROOT_KEYS = ("name", "title", "source", "compute", "keep", *_GEMMS, *FIXED_PLACES)
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

    def __post_init__(self) -> None:
        for a, b in zip(GEMM_PLACES[::2], GEMM_PLACES[1::2], strict=True):
            sizes = self.casts[a].hadamard, self.casts[b].hadamard
            if sizes[0] != sizes[1]:
                raise UserError(
                    f"recipe {self.name!r}: hadamard = {sizes[0]} in {a} and {sizes[1]} in {b}, but the "
                    "product stays the same only if both operands are transformed; "
                    "give both places the same size"
                )

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
            UserError: unknown place or cast, a place that this version cannot change, or two operands of a
                product that do not go together.
        """
        casts = dict(self.casts)
        for place, value in places.items():
            if place in FIXED_PLACES:
                if value != FIXED_PLACES[place]:
                    raise UserError(
                        f"recipe place {place!r} = {value!r}: this version keeps it in "
                        f"{FIXED_PLACES[place]}; remove the key, or narrow a GEMM operand "
                        f"({', '.join(GEMM_PLACES)})"
                    )
            elif place in GEMM_PLACES:
                casts[place] = _cast_in(place, value)
            else:
                raise unknown("recipe place", place, PLACES)
        return replace(self, casts=casts)


def parse_recipe(text: str, where: str) -> Recipe:
    """A recipe from the text of a TOML file; `where` names the file in errors.

    Raises:
        UserError: broken TOML, an unknown key or cast, a value of the wrong kind.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"recipe {where} is not valid TOML: {error}") from None
    _check_keys(table, _ROOT_KEYS, f"key of recipe {where}")
    keep = _subtable(table, "keep", where)
    _check_keys(keep, _KEEP_KEYS, f"[keep] key of recipe {where}")
    compute = table.get("compute", "bf16")
    if compute not in ("bf16", "fp32"):
        raise UserError(f"recipe {where}: compute = {compute!r}, but it must be 'bf16' or 'fp32'")
    base = Recipe(
        name=_text(table, "name", Path(where).stem, where),
        title=_text(table, "title", "", where),
        source=_text(table, "source", "", where),
        compute=compute,
        casts=dict.fromkeys(GEMM_PLACES, make_cast(compute)),
        keep_modules=_keep_modules(keep, where),
        keep_last_blocks=_keep_last_blocks(keep, where),
        text=text,
    )
    places = {f"{g}.{operand}": v for g in _GEMMS for operand, v in _subtable(table, g, where).items()}
    return base.with_places(places | {p: table[p] for p in FIXED_PLACES if p in table})


def _check_keys(table: Mapping[str, Any], known: tuple[str, ...], kind: str) -> None:
    for key in table:
        if key not in known:
            raise unknown(kind, key, known)


def _subtable(table: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    value = table.get(key, {})
    if not isinstance(value, Mapping):
        raise UserError(
            f"recipe {where}: {key} = {value!r}, but it must be a table; write [{key}] above its keys"
        )
    return value


def _text(table: Mapping[str, Any], key: str, default: str, where: str) -> str:
    value = table.get(key, default)
    if not isinstance(value, str):
        raise UserError(f"recipe {where}: {key} = {value!r}, but it must be text in quotes")
    return value


def _keep_modules(keep: Mapping[str, Any], where: str) -> tuple[str, ...]:
    names = keep.get("modules", [])
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise UserError(
            f'recipe {where}: modules = {names!r}, but it must be a list of names such as ["head"]'
        )
    return tuple(names)


def _keep_last_blocks(keep: Mapping[str, Any], where: str) -> float:
    share = keep.get("last_blocks", 0.0)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise UserError(f"recipe {where}: last_blocks = {share!r}, but it must be a share from 0 to 1")
    return float(share)


def _cast_in(place: str, value: Any) -> Cast:
    if not isinstance(value, str | Mapping):
        raise UserError(
            f'recipe place {place!r} = {value!r}, but it must be a cast such as "mxfp4", or a table such as '
            '{cast = "mxfp4", rounding = "stochastic"}'
        )
    try:
        return make_cast(value)
    except UserError as error:
        raise UserError(f"recipe place {place!r}: {error}") from None


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
