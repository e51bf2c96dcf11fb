"""The promises of a configuration about layers: which are narrow, in what, and which are not.

    compressed-tensors   config_groups: targets, weights, input_activations; ignore: names, "re:...", classes
    modelopt             quant_algo, quantized_layers, exclude_modules or ignore: names with * and ?
    fp8 (DeepSeek)       weight_block_size, modules_to_not_convert: parts of names
    mxfp4, torchao, ...  modules_to_not_convert: parts of names

(Sources: vllm-project/compressed-tensors 0.20, `utils/match.py`; NVIDIA/Model-Optimizer 0.47,
`export/quant_utils.py`; transformers 5, `quantizers/`.) A pattern is a regular expression of Python's; one
that could take exponential time is not tried.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

_REGEX = "re:"
_LONGEST = 300  # characters of a regular expression
_REPEATED_GROUP = re.compile(r"\)[*+{]")
#: Layers with weights in a matrix that tools leave wide by custom.
_WIDE_BY_CUSTOM = re.compile(
    r"(^|[._])(embed\w*|wte|wpe|lm_head|head|output|score|\w*norm\w*|ln_\w+|gate|router|shared_expert_gate|"
    r"patch\w*|position\w*|token_types|conv\w*)(\.|$)"
)
_IN_A_BLOCK = re.compile(r"(^|\.)(layers|h|blocks|blk|block|layer)\.\d+\.")
_PROJECTION = re.compile(r"(_proj|^(wq|wk|wv|wo|w1|w2|w3|fc1|fc2|qkv|proj|dense|query|key|value|linear\w*))$")
_ALGORITHMS = {
    **{"FP8": "fp8", "FP8_PER_CHANNEL_PER_TOKEN": "fp8", "FP8_PB_WO": "fp8", "FP8_PB_REAL": "fp8"},
    **{"NVFP4": "nvfp4", "NVFP4_AWQ": "nvfp4", "W4A16_NVFP4": "nvfp4", "MXFP8": "mxfp8", "MXFP4": "mxfp4"},
}
_STATIC = ("FP8", "NVFP4", "NVFP4_AWQ")  # algorithms of ModelOpt whose activations have a stored scale


@dataclass(frozen=True)
class Promise:
    """The part of a configuration for a group of layers.

    Attributes:
        kind: As `Layer.kind`; "" if unknown.
        targets: Names, "re:..." or classes of layers.
        group: Columns that share a scale; 0 if unknown.
        input: The part that holds the scale of activations, "input" or "input_global"; "" for none.
    """

    kind: str = ""
    targets: tuple[str, ...] = ("Linear",)
    group: int = 0
    input: str = ""

    def takes(self, layer: str) -> bool:
        """Whether a layer is a target."""
        return any(_matches(t, layer) or (t == "Linear" and is_projection(layer)) for t in self.targets)


@dataclass(frozen=True)
class Promises:
    """A configuration: its method, its groups, and the layers that it leaves out."""

    method: str
    groups: tuple[Promise, ...]
    ignore: tuple[str, ...]

    def of(self, layer: str) -> Promise | None:
        """The group of a layer; None if it is left out, or in no group."""
        if self.ignores(layer):
            return None
        return next((group for group in self.groups if group.takes(layer)), None)

    def ignores(self, layer: str) -> bool:
        """Whether an ignore rule matches a layer."""
        return any(self.matches(rule, layer) for rule in self.ignore)

    def matches(self, rule: str, layer: str) -> bool:
        """Whether an ignore rule matches a layer, as the method's own program decides."""
        if self.method == "compressed-tensors":
            return _matches(rule, layer)
        if self.method == "modelopt":
            return fnmatchcase(layer, rule) or layer.startswith(f"{rule}.") or fnmatchcase(layer, f"{rule}.*")
        return rule == layer or f".{rule}." in f".{layer}." or layer.startswith(rule)

    def useless(self, layers: Iterable[str]) -> list[str]:
        """The ignore rules that match no layer, and no module that holds layers."""
        names = {name for layer in layers for name in _modules(layer)}
        rules = (r for r in self.ignore if not r.endswith("lm_head") and r != "re:.*lm_head.*")
        return [r for r in rules if _is_safe(r) and not any(self.matches(r, name) for name in names)]


def promises_of(settings: Mapping[str, Any]) -> Promises | None:
    """The promises of the `quantization_config` of a `config.json`; None without one, or without a table."""
    table = settings.get("quantization_config")
    if not table and isinstance(text := settings.get("text_config"), dict):
        table = text.get("quantization_config")
    if not isinstance(table, dict) or not table:
        return None
    method = str(table.get("quant_method", ""))
    if method == "modelopt" or "quant_algo" in table:
        return _of_modelopt(table)
    if method == "compressed-tensors" or "config_groups" in table:
        groups = _tables(table.get("config_groups"))
        return Promises("compressed-tensors", tuple(map(_group, groups)), _texts(table.get("ignore")))
    ignore = table.get("modules_to_not_convert") or table.get("ignored_layers")
    kind = {"fp8": "fp8", "mxfp4": "mxfp4"}.get(method, "")
    block = table.get("weight_block_size")
    group = block[1] if isinstance(block, list) and len(block) == 2 and type(block[1]) is int else 0
    return Promises(method, (Promise(kind, group=group),), _texts(ignore))


def is_projection(layer: str) -> bool:
    """Whether a name is that of a linear layer of a block, by custom."""
    is_wide = _WIDE_BY_CUSTOM.search(layer.rpartition(".")[2])
    return bool(_IN_A_BLOCK.search(layer) and _PROJECTION.search(layer.rpartition(".")[2]) and not is_wide)


def _of_modelopt(table: Mapping[str, Any]) -> Promises:
    inner = table["quantization"] if isinstance(table.get("quantization"), dict) else table
    ignore = _texts(inner.get("exclude_modules")) or _texts(table.get("ignore"))
    layers = inner.get("quantized_layers")
    if isinstance(layers, dict):
        said = {name: v for name, v in layers.items() if isinstance(v, dict)}
        groups = tuple(_algorithm(str(v.get("quant_algo")), v, (name,)) for name, v in said.items())
    else:
        groups = (_algorithm(str(inner.get("quant_algo")), inner, ("Linear",)),)
    return Promises("modelopt", groups, ignore)


def _algorithm(name: str, table: Mapping[str, Any], targets: tuple[str, ...]) -> Promise:
    group = table.get("group_size")
    kind = _ALGORITHMS.get(name, "")
    size = group if type(group) is int and kind in ("nvfp4", "mxfp4", "mxfp8") else 0
    return Promise(kind, targets, size, "input" if name in _STATIC else "")


def _group(table: Mapping[str, Any]) -> Promise:
    weights, inputs = table.get("weights"), table.get("input_activations")
    weights = weights if isinstance(weights, dict) else {}
    inputs = inputs if isinstance(inputs, dict) else {}
    bits, strategy = weights.get("num_bits"), weights.get("strategy")
    is_float = weights.get("type") == "float"
    is_mx = is_float and weights.get("group_size") == 32 and strategy == "group"
    kinds = {4: "mxfp4" if is_mx else "nvfp4", 6: "mxfp6", 8: "mxfp8" if is_mx else "fp8"}
    kind = kinds.get(bits, "") if type(bits) is int else ""
    size = weights.get("group_size")
    dynamic = inputs.get("dynamic", True)
    part = {False: "input", "local": "input_global"}.get(dynamic, "")
    return Promise(
        kind if is_float else "int",
        _texts(table.get("targets")),
        size if type(size) is int and size > 0 else 0,
        part if inputs and inputs.get("type") == "float" else "",
    )


def _matches(target: str, layer: str) -> bool:
    if not target.startswith(_REGEX):
        return target == layer
    if not _is_safe(target):
        return False
    try:
        return bool(re.match(target.removeprefix(_REGEX), layer))
    except re.error:
        return False


def _is_safe(rule: str) -> bool:
    """Whether a rule can be tried: no regular expression, or one without a repeated group."""
    return not rule.startswith(_REGEX) or (len(rule) <= _LONGEST and not _REPEATED_GROUP.search(rule))


def _modules(layer: str) -> list[str]:
    """A layer and the modules that hold it."""
    words = layer.split(".")
    return [".".join(words[:i]) for i in range(1, len(words) + 1)]


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(v for v in value if isinstance(v, str)) if isinstance(value, list) else ()


def _tables(value: Any) -> list[Mapping[str, Any]]:
    return [v for v in value.values() if isinstance(v, dict)] if isinstance(value, dict) else []
