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
from functools import cache
from pathlib import Path
from textwrap import indent
from typing import Any

from narrowgauge.exchange.table import Layers, Reading, Refusal, read_file, yaml_documents
from narrowgauge.quantization import Cast, make_cast
from narrowgauge.recipes.places import SEEN_BEFORE, values_of
from narrowgauge.recipes.recipe import Recipe
from narrowgauge.system.errors import UserError

PATTERN = ""
VERSION = "ModelOpt 0.47.0dev (a2fbac7, 2026-08-21)"
WEIGHT, INPUT = "weight_quantizer", "input_quantizer"
PLACES = {INPUT: "fprop.x", WEIGHT: "fprop.w"}
#: The places that get the values of the forward pass.
PASSED = ("dgrad.w", "wgrad.x")
HEAD, HEADS = "*lm_head*", ("head", "lm_head")  # ModelOpt's pattern, and the names of recipes for it
#: Patterns that ModelOpt disables beside the head: they fit layers that the models here do not have, or that
#: stay wide under every recipe (routers).
DISABLED = (
    *("*output_layer*", "*proj_out.*", "output.*", "mtp.*", "*router*", "*mlp.gate.*"),
    *("*mlp.shared_expert_gate.*", "*block_sparse_moe.gate*", "*linear_attn.conv1d*"),
    *("*linear_attn.in_proj_a*", "*linear_attn.in_proj_b*", "*mixer.conv1d*", "*embed_vision*"),
    *("*vision_tower*", "*visual*", "*vision_model*", "*multi_modal_projector*"),
)
#: Patterns of ModelOpt's, and the names of the same layers in the models here.
_ALSO = {"*mlp*": ("up", "gate_up", "down"), "*o_proj*": ("attention_out",)}


NOTES = (
    "Give it to ModelOpt as a recipe, or its quant_cfg to mtq.quantize; then train (QAT).",
    "ModelOpt takes the largest magnitude of FP8 tensors, and of NVFP4's tensor scales, from a "
    "calibration; the recipe takes it from each tensor.",
)


def _numerics() -> Iterator[tuple[str, Cast]]:
    yield "num_bits: e4m3", make_cast("e4m3")
    yield "num_bits: e4m3\naxis: 0", make_cast("fp8-row")
    yield "num_bits: e4m3\ntype: dynamic\nblock_sizes:\n  -1:", make_cast("fp8-row")
    yield "num_bits: e4m3\nblock_sizes:\n  -1: 128", make_cast("fp8-1x128")
    yield "num_bits: e4m3\nblock_sizes:\n  -1: 128\n  -2: 128", make_cast("fp8-128x128")
    scaled = "num_bits: {}\nblock_sizes:\n  -1: {}\n  scale_bits: {}\n  type: dynamic"
    names = {"e2m1": "mxfp4", "e2m3": "mxfp6-e2m3", "e3m2": "mxfp6-e3m2", "e4m3": "mxfp8", "8": "mxint8"}
    for bits, name in names.items():
        yield scaled.format(bits, 32, "e8m0"), make_cast(name)
    for block in (16, 32):  # NVFP4's own is 16
        yield scaled.format("e2m1", block, "e4m3"), make_cast({"cast": "nvfp4", "block": block})


#: The `cfg` of a quantizer as YAML, and the cast.
NUMERICS: Sequence[tuple[str, Cast]] = tuple(_numerics())


def choices(recipe: Recipe, place: str) -> list[Cast]:
    """The casts that ModelOpt has in a place."""
    wide, of = make_cast(recipe.compute), SEEN_BEFORE.get(place, "")
    if place in PASSED:
        return [wide if recipe.casts[of] == wide else values_of(of)]
    return [*(c for _, c in NUMERICS), wide] if place in PLACES.values() else [wide]


def others(recipe: Recipe, layers: Layers, found: Sequence[Refusal]) -> list[Refusal]:
    """Layers that ModelOpt cannot select."""
    ends = {"first_blocks": layers.first_blocks, "last_blocks": layers.last_blocks}
    return [
        Refusal("", f"keep.{key}", f"keep.{key} = {count}, and modelopt has patterns of names")
        for key, count in ends.items()
        if count
    ]


def write(recipe: Recipe, layers: Layers, blocks: int | None) -> tuple[Sequence[str], str]:
    """The notes and the YAML file."""
    also = {name for pattern in layers.only for name in _ALSO.get(pattern, ())}
    narrow = [_pattern(name, ".") for name in layers.only if name not in also]
    wide = [HEAD if name in HEADS else _pattern(name, ".*") for name in layers.modules]
    entries = [("*", "")]
    for pattern in narrow or ["*"]:
        for kind, place in reversed(PLACES.items()):
            # the form that ModelOpt has for this quantizer: axes for weights, blocks for inputs
            found = [cfg for cfg, cast in NUMERICS if cast == recipe.casts[place]]
            entries += [(f"{pattern}{kind}", found[-1 if kind == INPUT else 0])] if found else []
    entries += [(pattern, "") for pattern in dict.fromkeys(wide)]
    file = f"""\
metadata:
  recipe_type: ptq
  description: Recipe {recipe.name} of narrowgauge.
quantize:
  algorithm: max
  quant_cfg:
"""
    for pattern, cfg in entries:
        file += f"    - quantizer_name: '{pattern}'\n"
        file += f"      cfg:\n{indent(cfg, ' ' * 8)}\n" if cfg else "      enable: false\n"
    return NOTES, file


def _pattern(name: str, end: str) -> str:
    """ModelOpt's pattern for a name or pattern of layers; it ends with a star, or with `end`."""
    pattern = name if "*" in name else f"*.{name}"
    return pattern if pattern.endswith("*") else f"{pattern}{end}"


def read(text: str, path: Path, blocks: int | None) -> Reading:
    """A recipe of `modelopt_recipes`, or a file with a `quant_cfg`; `$import` is followed below its root."""
    root = next((p for p in path.resolve().parents if (p / "configs").is_dir()), path.resolve().parent)
    content = _placed(yaml_documents(text), root)
    part = content.get("quantize", content) if isinstance(content, Mapping) else {}
    if not isinstance(part.get("quant_cfg"), list):
        raise UserError("it has no list quant_cfg; name a recipe of ModelOpt's for quantization")
    algorithm = part.get("algorithm")
    method = algorithm.get("method") if isinstance(algorithm, Mapping) else algorithm
    if method not in (None, "max"):
        raise UserError(
            f"algorithm {method!r} changes weights or scales by a calibration, and a recipe has "
            "none; take the recipe with algorithm: max"
        )
    of_layers, keep, lost = _entries(part["quant_cfg"])
    if not of_layers:
        raise UserError(f"it enables no {WEIGHT} and no {INPUT}; there is nothing to put into a recipe")
    first, *others = of_layers.values()
    if any(casts != first for casts in others):
        raise UserError(
            f"{', '.join(of_layers)} have different formats, and what is read has one set of casts; "
            "write the others as [[rule]] by hand"
        )
    casts = {place: first[place] for place in PLACES.values() if place in first}
    casts |= {p: values_of(SEEN_BEFORE[p]) for p in PASSED if SEEN_BEFORE[p] in first}
    only = [name for layers in of_layers for name in (layers.removesuffix("."), *_ALSO.get(layers, ()))]
    said = "algorithm max: largest magnitudes come from each tensor, not from a calibration"
    layers = Layers(() if "*" in of_layers else tuple(dict.fromkeys(only)), tuple(dict.fromkeys(keep)))
    return Reading(casts=casts, layers=layers, lost=[*[said] * bool(method), *dict.fromkeys(lost)])


def _entries(items: list[Any]) -> tuple[dict[str, dict[str, Cast]], list[str], list[str]]:
    """The casts of each pattern of layers, the layers that stay wide, and what is lost of a quant_cfg."""
    of_layers: dict[str, dict[str, Cast]] = {}
    keep: list[str] = []
    lost: list[str] = []
    for item in items:
        if not isinstance(item, Mapping) or not isinstance(name := item.get("quantizer_name"), str):
            raise UserError(f"an entry of quant_cfg without quantizer_name: {item!r}; add it")
        is_off, parent = item.get("enable") is False, item.get("parent_class")
        kind = next((k for k in PLACES if name.endswith(k)), "")
        layers, place = name.removesuffix(kind), PLACES.get(kind, "")
        if extra := set(item) - {"quantizer_name", "enable", "cfg", "parent_class"}:
            raise UserError(
                f"entry {name!r} has {', '.join(sorted(extra))}, which no recipe holds; remove it"
            )
        if parent is not None and not is_off:
            raise UserError(f"entry {name!r} is for {parent}, and recipes are for Linear; remove it")
        if parent is not None or (is_off and layers in DISABLED):
            continue
        if is_off and kind:
            of_layers.get(layers, {}).pop(place, None)
        elif is_off and layers == "*":
            of_layers, keep = {}, []
        elif is_off:  # the layer, and those inside it
            keep += HEADS if layers == HEAD else (layers.removesuffix(".*"), layers)
        elif name.endswith("bmm_quantizer"):
            lost.append(f"{name}: a recipe has no KV cache")
        elif not kind:
            raise UserError(f"quantizer {name!r} is none of {WEIGHT}, {INPUT}; a recipe has no such place")
        else:
            given = _values(item.get("cfg"))
            if (cast := next((c for known, c in _numerics_read() if known == given), None)) is None:
                raise UserError(
                    f"quantizer {name!r} has {given}, for which no cast stands in the table; take another"
                )
            of_layers.setdefault(layers, {})[place] = cast
    return {layers: casts for layers, casts in of_layers.items() if casts}, keep, lost


def _placed(documents: Sequence[Any], root: Path, depth: int = 0) -> Any:
    """The last document of a file, with the files that it imports in place."""
    if depth > 8:
        raise UserError("imports lie more than eight deep; write the entries out")
    imports: dict[str, str] = {}
    for document in documents:
        imports |= document.get("imports") or {} if isinstance(document, Mapping) else {}

    def placed(value: Any) -> Any:
        if isinstance(value, list):
            made = (item if isinstance(item, list) else [item] for item in map(placed, value))
            return [one for several in made for one in several]
        if not isinstance(value, Mapping):
            return value
        rest = {k: placed(v) for k, v in value.items() if k != "$import"}
        if "$import" not in value:
            return rest
        name = str(value["$import"])
        target = (root / f"{imports.get(name, name)}.yaml").resolve()
        if name not in imports or not target.is_relative_to(root):
            raise UserError(f"$import {name!r} is not among its imports below {root}; correct it")
        base = _placed(read_file(target, yaml_documents), root, depth + 1)
        return {**base, **rest} if isinstance(base, Mapping) else base

    return placed(documents[-1])


@cache
def _numerics_read() -> list[tuple[Any, Cast]]:
    return [(_values(yaml_documents(cfg)[0]), c) for cfg, c in NUMERICS]


def _values(cfg: Any) -> Any:
    """A cfg without what does not change its values; a format (E, M) by its name."""
    if isinstance(cfg, list | tuple) and len(cfg) == 2:
        return f"e{cfg[0]}m{cfg[1]}"
    if not isinstance(cfg, Mapping):
        return cfg
    kept = {k: v for k, v in cfg.items() if k not in ("type", "effective_bits", "enable")}
    return {k: _values(v) for k, v in kept.items() if v is not None or isinstance(k, int)}
