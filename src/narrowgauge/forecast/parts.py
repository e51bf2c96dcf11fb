"""A recipe as the law sees it: its narrow GEMMs, the share of wide blocks, and what the law cannot price."""

from dataclasses import dataclass
from functools import lru_cache

from narrowgauge.forecast.atlas import Atlas, Point
from narrowgauge.forecast.noise import cast_text, noise_of
from narrowgauge.forecast.setting import NEW, Observed, Part, Setting
from narrowgauge.quantization import Cast
from narrowgauge.recipes import GEMM_PLACES, GEMMS, Outline, Recipe, resolve

BLOCKS = 32  # of a model whose depth is not given; a share of blocks is rounded up to whole ones
_LAYERS = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")  # names that patterns of rules select
_HEADS = {"head", "lm_head"}


@dataclass(frozen=True, slots=True)
class Described:
    """What the law reads from a recipe."""

    parts: tuple[Part, ...]  # its narrow GEMMs
    tail: float  # the share of blocks that it keeps wide
    finishes: bool  # whether the forward pass becomes wide once the learning rate falls
    beyond: str  # what it narrows that no law of GEMMs describes, in words; "" for nothing

    def setting(
        self, name: str, params: float, tokens: float, tail: float | None = None, family: str = NEW
    ) -> Setting:
        """The recipe at a size and a length, with the share of wide blocks that a run had."""
        share = self.tail if tail is None else tail
        return Setting(name, self.parts, params, tokens, family, share, self.finishes)


def described(recipe: Recipe) -> Described:
    """What the law reads from a recipe."""
    parts = tuple(part for gemm in GEMMS if (part := _part(recipe, gemm)) is not None)
    timed = [rule for rule in recipe.rules if rule.is_timed and rule.casts]
    finishes = any(
        rule.start.decay
        and rule.is_for_all
        and all(not _is_narrow(rule.casts.get(place, recipe.casts[place])) for place in GEMM_PLACES[:2])
        for rule in timed
    )
    has_tail = any(
        rule.casts and not rule.is_timed and not set(rule.modules) <= _HEADS for rule in recipe.rules
    )
    has_tail = has_tail or any(rule.first_blocks or rule.last_blocks for rule in recipe.rules)
    tail = tail_share(recipe) if has_tail else 0.0  # resolving takes time
    return Described(parts, tail, finishes, _beyond(recipe, len(timed) > finishes))


def tail_share(recipe: Recipe, blocks: int = BLOCKS) -> float:
    """The share of the blocks in which a recipe keeps every GEMM wide, in a model of some equal blocks."""
    layers = resolve(recipe, _outline(blocks)).parts.items()
    narrow = {
        name.split(".")[1]
        for name, layer in layers
        if name != "head" and any(_is_narrow(layer.casts[place]) for place in GEMM_PLACES)
    }
    return (blocks - len(narrow)) / blocks


@lru_cache(maxsize=4)
def _outline(blocks: int) -> Outline:
    names = [f"blocks.{number}" for number in range(blocks)]
    layers: dict[str, list[tuple[str, int | None]]] = {"head": [("head", None)]}
    for number, block in enumerate(names):
        layers |= {f"{block}.{layer}": [(f"{block}.{layer}", number)] for layer in _LAYERS}
    return Outline(layers, dict.fromkeys(layers, (128, 128)), names)


def _part(recipe: Recipe, gemm: str) -> Part | None:
    """The part of a GEMM; None if both operands are wide."""
    casts = [recipe.casts[place] for place in GEMM_PLACES if place.startswith(f"{gemm}.")]
    narrow = [cast for cast in casts if _is_narrow(cast)]
    if not narrow:
        return None
    text = " x ".join(cast_text(cast) if _is_narrow(cast) else "wide" for cast in casts)
    return Part(gemm, text, sum(map(noise_of, narrow)))


def _is_narrow(cast: Cast) -> bool:
    return cast.element.bits < 16


def _beyond(recipe: Recipe, is_timed: bool) -> str:
    """What the recipe changes in addition to GEMMs, in words."""
    state = [place for place, cast in recipe.state.items() if cast is not None and cast.name != "fp32"]
    found = [f"state in few bits ({', '.join(state)})"] if state else []
    if any(c.function for casts in (recipe.casts, *(r.casts for r in recipe.rules)) for c in casts.values()):
        found.append("casts that are custom functions")
    if recipe.narrows_attention:
        found.append("narrow GEMMs of attention")
    if recipe["stream"].element.bits < 32 and recipe["stream"].element.name not in ("bf16", "fp32"):
        found.append("a narrow residual stream")
    if is_timed:
        found.append("GEMMs that change during the run")
    return " and ".join(found)


def observations(atlas: Atlas) -> list[Observed]:
    """Each point of an atlas at its setting, in its order."""
    by_name = {name: described(recipe) for name, recipe in atlas.recipes.items()}
    return [observation(point, by_name[point.recipe]) for point in atlas.points]


def observation(point: Point, of_recipe: Described) -> Observed:
    """One point at its setting."""
    setting = of_recipe.setting(point.recipe, point.params, point.tokens, point.tail_share, point.family)
    return Observed(setting, point.gap_percent, point.seeds, _stated_error(point))


def _stated_error(point: Point) -> float | None:
    text = point.more.get("gap_error", "")
    try:
        return float(text) or None
    except ValueError:
        return None
