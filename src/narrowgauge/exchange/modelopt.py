"""A recipe for NVIDIA's ModelOpt: the YAML of a `quant_cfg`, an ordered list in which later entries win.

ModelOpt quantizes the inputs and weights of the forward pass and trains through them (QAT): the gradient
passes the rounding unchanged, and the backward pass multiplies in the compute format by the values that the
forward pass used. So `dgrad.w` is "fprop.w", `wgrad.x` is "fprop.x", and gradients are wide.

`NUMERICS` is the table of both directions: the `cfg` of a quantizer, and its cast. E8M0 scales are rounded up
(qtensor/mxfp8_tensor.py, mxfp4_tensor.py), the "rceil" of recipes. A quantizer's largest magnitude comes from
a calibration there, and from the tensor at hand here; that, the algorithm `max` and the KV cache are what a
recipe loses. Algorithms that move weights or search scales (awq, gptq, mse and others) are refused.

Source: ModelOpt @ a2fbac7, modelopt_recipes/ and modelopt/torch/quantization/config.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from narrowgauge.exchange.layers import kept, narrowed
from narrowgauge.exchange.reading import Keep, Reading, yaml_documents
from narrowgauge.exchange.refusal import Refusal, cast_refusals, outside_products
from narrowgauge.quantization import Cast, make_cast
from narrowgauge.recipes.places import SEEN_BEFORE, values_of
from narrowgauge.recipes.recipe import Recipe
from narrowgauge.system.errors import UserError

VERSION = "ModelOpt 0.47.0dev (a2fbac7, 2026-08-21)"
WEIGHT, INPUT = "weight_quantizer", "input_quantizer"
PLACES = {INPUT: "fprop.x", WEIGHT: "fprop.w"}
#: The places that get the values of the forward pass.
PASSED = ("dgrad.w", "wgrad.x")
HEADS = ("head", "lm_head")
#: Patterns that ModelOpt always disables, and the names of recipes for them. Those without a name fit layers
#: that the models here do not have, or that stay wide under every recipe (routers).
DISABLED: Mapping[str, tuple[str, ...]] = {
    "*lm_head*": HEADS,
    **dict.fromkeys(("*output_layer*", "*proj_out.*", "output.*", "mtp.*"), ()),
    **dict.fromkeys(("*router*", "*mlp.gate.*", "*mlp.shared_expert_gate.*", "*block_sparse_moe.gate*"), ()),
    **dict.fromkeys(("*linear_attn.conv1d*", "*linear_attn.in_proj_a*", "*linear_attn.in_proj_b*"), ()),
    **dict.fromkeys(("*mixer.conv1d*", "*embed_vision*", "*vision_tower*", "*visual*"), ()),
    **dict.fromkeys(("*vision_model*", "*multi_modal_projector*"), ()),
}
#: Patterns of ModelOpt's, and the names of the same layers in the models here.
_ALSO = {"*mlp*": ("up", "gate_up", "down"), "*o_proj*": ("attention_out",)}


def _numerics() -> Iterator[tuple[Mapping[str, Any], Cast]]:
    yield {"num_bits": "e4m3"}, make_cast("e4m3")
    yield {"num_bits": "e4m3", "axis": 0}, make_cast("fp8-row")
    yield {"num_bits": "e4m3", "block_sizes": {-1: None}}, make_cast("fp8-row")
    yield {"num_bits": "e4m3", "block_sizes": {-1: 128}}, make_cast("fp8-1x128")
    yield {"num_bits": "e4m3", "block_sizes": {-1: 128, -2: 128}}, make_cast("fp8-128x128")
    names = {"e2m1": "mxfp4", "e2m3": "mxfp6-e2m3", "e3m2": "mxfp6-e3m2", "e4m3": "mxfp8", "int8": "mxint8"}
    for element, name in names.items():
        bits = 8 if element == "int8" else element
        yield {"num_bits": bits, "block_sizes": {-1: 32, "scale_bits": "e8m0"}}, make_cast(name)
    for block in (16, 32):
        cfg = {"num_bits": "e2m1", "block_sizes": {-1: block, "scale_bits": "e4m3"}}
        yield cfg, make_cast("nvfp4" if block == 16 else {"cast": "nvfp4", "block": block})


#: The `cfg` of a quantizer without what does not change its values, and the cast.
NUMERICS: Sequence[tuple[Mapping[str, Any], Cast]] = tuple(_numerics())


def refusals(recipe: Recipe) -> list[Refusal]:
    """What ModelOpt cannot express of a recipe."""
    recipe, _ = narrowed(recipe)
    casts, wide = recipe.casts, make_cast(recipe.compute)
    found = outside_products(recipe, "modelopt")
    for place in PLACES.values():
        found += cast_refusals(place, casts[place], [*(c for _, c in NUMERICS), wide], "modelopt")
    for place in ("dgrad.dy", "wgrad.dy"):
        found += cast_refusals(place, casts[place], [wide], "modelopt")
    for place in PASSED:
        of = SEEN_BEFORE[place]
        same = wide if casts[of] == wide else values_of(of)
        found += cast_refusals(place, casts[place], [same], "modelopt")
    for key, count in zip(("first_blocks", "last_blocks"), kept(recipe)[1:], strict=True):
        if count:
            why = f"keep.{key} = {count}, and modelopt has patterns of names"
            found.append(Refusal("", f"keep.{key}", why))
    return found


def text(recipe: Recipe, blocks: int | None = None) -> str:
    """The YAML file."""
    recipe, only = narrowed(recipe)
    lines = [
        "metadata:",
        "  recipe_type: ptq",
        f"  description: Recipe {recipe.name} of narrowgauge.",
        "quantize:",
        "  algorithm: max",
        "  quant_cfg:",
        *_entry("*"),
    ]
    for layers in _narrow_patterns(only) if only else ("*",):
        for kind, place in reversed(PLACES.items()):
            if recipe.casts[place] != make_cast(recipe.compute):
                lines += _entry(f"{layers}{kind}", _cfg(recipe.casts[place], kind))
    for pattern in dict.fromkeys(map(_their_pattern, kept(recipe)[0])):
        lines += _entry(pattern)
    return "\n".join(lines) + "\n"


def _cfg(c: Cast, kind: str) -> Mapping[str, Any]:
    """The cfg of a cast, of the form that ModelOpt has for this quantizer."""
    found = [cfg for cfg, other in NUMERICS if other == c]
    return found[-1] if kind == INPUT else found[0]


def _entry(pattern: str, cfg: Mapping[str, Any] | None = None) -> list[str]:
    lines = [f"    - quantizer_name: '{pattern}'"]
    if cfg is None:
        return [*lines, "      enable: false"]
    lines += ["      cfg:", f"        num_bits: {cfg['num_bits']}"]
    lines += [f"        axis: {cfg['axis']}"] if "axis" in cfg else []
    if sizes := cfg.get("block_sizes"):
        lines += ["        type: dynamic"] if None in sizes.values() else []
        lines += ["        block_sizes:"]
        lines += [f"          {k}:{'' if v is None else f' {v}'}" for k, v in sizes.items()]
        lines += ["          type: dynamic"] if "scale_bits" in sizes else []
    return lines


def _narrow_patterns(modules: Sequence[str]) -> list[str]:
    """ModelOpt's patterns for the names of narrow layers, without those that a pattern stands for."""
    also = {name for pattern in modules for name in _ALSO.get(pattern, ())}
    names = [name if "*" in name else f"*.{name}" for name in modules if name not in also]
    return [name if name.endswith("*") else f"{name}." for name in names]


def _their_pattern(name: str) -> str:
    """ModelOpt's pattern of quantizers for a name or pattern of layers."""
    if name in HEADS:
        return "*lm_head*"
    pattern = name if "*" in name else f"*.{name}"
    return pattern if pattern.endswith("*") else f"{pattern}.*"


def notes(recipe: Recipe) -> list[str]:
    """The places where the values of ModelOpt differ, and what its user has to do."""
    return [
        "Give it to ModelOpt as a recipe, or its quant_cfg to mtq.quantize; then train (QAT).",
        "ModelOpt takes the largest magnitude of FP8 tensors, and of NVFP4's tensor scales, from a "
        "calibration; the recipe takes it from each tensor.",
    ]


class _Entry(NamedTuple):
    """One entry of a quant_cfg: layers, quantizers, and the cast that they get; None to disable them."""

    layers: str
    kinds: tuple[str, ...]
    cast: Cast | None = None


def read(path: Path, blocks: int | None = None) -> Reading:
    """A recipe of `modelopt_recipes`, or a file with a `quant_cfg`; `$import` is followed below its root.

    Raises:
        UserError: A quantizer, format or algorithm has no counterpart in a recipe; the sentence names it.
    """
    content = _resolved(path)
    part = content.get("quantize", content) if isinstance(content, Mapping) else None
    if not isinstance(part, Mapping) or not isinstance(part.get("quant_cfg"), list):
        raise UserError(f"{path} has no list quant_cfg; name a recipe of ModelOpt's for quantization")
    lost = _calibration(path, part.get("algorithm"))
    entries = [_entry_of(path, item) for item in part["quant_cfg"]]
    lost += [entry for entry in entries if isinstance(entry, str)]
    return _reading(path, [e for e in entries if isinstance(e, _Entry)], list(dict.fromkeys(lost)))


def _calibration(path: Path, algorithm: Any) -> list[str]:
    """What is lost of an algorithm."""
    method = algorithm.get("method") if isinstance(algorithm, Mapping) else algorithm
    if method not in (None, "max"):
        raise UserError(
            f"{path}: algorithm {method!r} changes weights or scales by a calibration, and a recipe has "
            "none; take the recipe with algorithm: max"
        )
    said = "algorithm max: largest magnitudes come from each tensor, not from a calibration"
    return [said] if method else []


def _resolved(path: Path) -> Any:
    """The last document of a file, with its imports in place."""
    root = next((p for p in path.resolve().parents if (p / "configs").is_dir()), path.resolve().parent)

    def load(file: Path, depth: int) -> Any:
        if depth > 8:
            raise UserError(f"{file}: imports lie more than eight deep; write the entries out")
        documents = yaml_documents(file) or [None]
        imports: dict[str, str] = {}
        for document in documents:
            imports |= dict(document.get("imports") or {}) if isinstance(document, Mapping) else {}

        def imported(name: str) -> Any:
            target = (root / f"{imports.get(name, name)}.yaml").resolve()
            if name not in imports or not target.is_relative_to(root):
                raise UserError(f"{file}: $import {name!r} is not among its imports below {root}; correct it")
            return load(target, depth + 1)

        def place(value: Any) -> Any:
            if isinstance(value, Mapping):
                rest = {k: place(v) for k, v in value.items() if k != "$import"}
                if "$import" not in value:
                    return rest
                base = imported(str(value["$import"]))
                return {**base, **rest} if isinstance(base, Mapping) else base
            if isinstance(value, list):
                made: list[Any] = []
                for item in map(place, value):
                    made += item if isinstance(item, list) else [item]
                return made
            return value

        return place(documents[-1])

    return load(path, 0)


def _entry_of(path: Path, item: Any) -> _Entry | str | None:
    """An entry; or what is lost with it; or None, if it says nothing about linear layers."""
    if not isinstance(item, Mapping) or not isinstance(name := item.get("quantizer_name"), str):
        raise UserError(f"{path}: an entry of quant_cfg without quantizer_name: {item!r}; add it")
    is_off = item.get("enable") is False
    if extra := set(item) - {"quantizer_name", "enable", "cfg", "parent_class"}:
        raise UserError(
            f"{path}: entry {name!r} has {', '.join(sorted(extra))}, which no recipe holds; remove it"
        )
    if "parent_class" in item:
        if not is_off:
            raise UserError(
                f"{path}: entry {name!r} is for {item['parent_class']}, and recipes are for Linear"
            )
        return None
    kind = next((k for k in PLACES if name.endswith(k)), "")
    layers, kinds = name.removesuffix(kind), (kind,) if kind else tuple(PLACES)
    if is_off:
        return _Entry(layers, kinds)
    if name.endswith("bmm_quantizer"):
        return f"{name}: a recipe has no KV cache"
    if not kind:
        raise UserError(
            f"{path}: quantizer {name!r} is none of {WEIGHT}, {INPUT}; a recipe has no such place"
        )
    return _Entry(layers, kinds, _cast(path, name, item.get("cfg")))


def _cast(path: Path, name: str, cfg: Any) -> Cast:
    given = {k: v for k, v in cfg.items() if v is not None} if isinstance(cfg, Mapping) else {}
    plain = {k: v for k, v in given.items() if k not in ("type", "effective_bits", "enable")}
    plain["num_bits"] = _bits(given.get("num_bits"))
    sizes = plain.pop("block_sizes", None)
    if isinstance(sizes, Mapping):
        sizes = {k: _bits(v) if k == "scale_bits" else v for k, v in sizes.items() if k != "type"}
        plain["block_sizes"] = sizes
    found = next((c for known, c in NUMERICS if known == plain), None)
    if found is None:
        raise UserError(
            f"{path}: quantizer {name!r} has {given}, for which no cast stands in the table; take another"
        )
    return found


def _bits(value: Any) -> Any:
    """The name of a format; a pair (E, M) is also one."""
    is_pair = isinstance(value, list | tuple) and len(value) == 2
    return f"e{value[0]}m{value[1]}" if is_pair else value


def _reading(path: Path, entries: Sequence[_Entry], lost: list[str]) -> Reading:
    """The places and layers that a list of entries comes to."""
    of_layers: dict[str, dict[str, Cast]] = {}
    keep: list[str] = []
    for layers, kinds, cast in entries:
        if cast is not None:
            of_layers.setdefault(layers, {})[PLACES[kinds[0]]] = cast
        elif len(kinds) == 1:
            of_layers.get(layers, {}).pop(PLACES[kinds[0]], None)
        elif layers == "*":
            of_layers, keep = {}, []
        else:  # the layer, and those inside it
            keep += DISABLED.get(layers, (layers.removesuffix(".*"), layers))
    of_layers = {layers: casts for layers, casts in of_layers.items() if casts}
    if not of_layers:
        raise UserError(f"{path} enables no {WEIGHT} and no {INPUT}; there is nothing to put into a recipe")
    first, *others = of_layers.values()
    if any(casts != first for casts in others):
        raise UserError(
            f"{path}: {', '.join(of_layers)} have different formats, and what is read has one set of casts; "
            "write the others as [[rule]] by hand"
        )
    casts = {place: first[place] for place in PLACES.values() if place in first}
    casts |= {p: values_of(SEEN_BEFORE[p]) for p in PASSED if SEEN_BEFORE[p] in first}
    only = [name for layers in of_layers for name in (layers.removesuffix("."), *_ALSO.get(layers, ()))]
    return Reading(
        casts=casts,
        only=() if "*" in of_layers else tuple(dict.fromkeys(only)),
        keep=Keep(tuple(dict.fromkeys(keep))),
        lost=lost,
    )
