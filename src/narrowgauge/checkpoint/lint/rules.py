"""The rules of `lint`: each looks at a layer, or at all, and names the thread or specification it is from.

A rule speaks of what makes a server compute something else than the checkpoint means, or refuse to load it.
Bounds are for trained networks, whose linear weights are between 2^-16 and 100 in magnitude.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from narrowgauge.checkpoint.interop.gguf.container import TYPES
from narrowgauge.checkpoint.lint.layers import Floats, Layer, Sample, floats, ggml_scales, scale_rows
from narrowgauge.checkpoint.lint.promises import Promises, is_projection
from narrowgauge.checkpoint.lint.stored import Checkpoint, Stored

#: The source of each rule, in the order in which findings are listed.
SOURCES: Mapping[str, str] = {
    "damaged-file": "the safetensors format, README; ggml, docs/gguf.md",
    "missing-tensor": "vllm-project/vllm#57108: the index lists scales that the files lack",
    "nothing-narrow": "NVIDIA-NeMo/RL#3615: a converter that quantizes 0 tensors",
    "promised-narrow": "vllm-project/vllm#52501: a wide layer where the server expects scales",
    "ignored-narrow": "sgl-project/sglang#35792: the file and the ignore list disagree",
    "ignore-matches-nothing": "NVIDIA-NeMo/RL#3566: a rule that cannot fire",
    "no-config": "leejet/stable-diffusion.cpp#1898: narrow weights that are read as plain numbers",
    "other-format": "vllm-project/vllm#52501: a mixed checkpoint that its configuration calls uniform",
    "scale-missing": "kekzl/imp#1450, unslothai/unsloth#6200: codes without their scales",
    "scale-alone": "vllm-project/vllm#52501: scales of a layer that is stored wide",
    "scale-shape": "OCP MX 1.0, section 5; NVIDIA/Model-Optimizer, nvfp4_tensor.py: one scale for each block",
    "scale-nan": "NVIDIA/Model-Optimizer#1633: NaN bytes in scales; OCP MX 1.0, section 5.4.1: E8M0 255",
    "scale-sign": "vllm-project/vllm-omni#5262: scales that were never filled in",
    "nan-codes": "OCP 8-bit Floating Point 1.0: S.1111.111 is NaN in E4M3",
    "scale-inverted": "kekzl/imp#1433, modular/modular#6600: a scale and its reciprocal",
    "scale-range": "leejet/stable-diffusion.cpp#1898: weights off by their scale",
    "scale-outlier": "kekzl/imp#1433: one layer by another convention than the others",
    "codes-saturated": "OCP MX 1.0, section 6.3: the scale lets the largest value of a block fit",
    "codes-zero": "OCP MX 1.0, section 6.3: the scale brings the largest value near the largest code",
    "fused-scales": "vllm-project/llm-compressor#1869, vllm-project/vllm#41045: q, k and v share a scale",
    "fused-precision": "vllm-project/vllm#25378: some but not all shards of a fused layer are narrow",
    "input-scale-missing": "sgl-project/sglang#23625: activations fall back to a scale of 1",
    "input-scale": "kekzl/imp#1433, vllm-project/vllm-omni#5262: the scale of activations",
}
_LARGEST, _SMALLEST = 100.0, 2.0**-16  # of a trained weight in magnitude
_LARGEST_INPUT, _SMALLEST_INPUT = 1e5, 1e-4  # of the activations that a scale reaches
_LIKELY_INPUT = (1e-2, 2e4)
_OUTLIER, _OF_A_ROLE = 64.0, 4  # a factor from the median of layers of one role, and how many it takes
_SATURATED, _ZERO = {"fp8": 0.05, "mxfp8": 0.6}, 0.97  # shares of codes at the largest, and at 0
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
_BLOCKS = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32}


@dataclass(frozen=True, order=True)
class Finding:
    """What a rule found: its name, the tensor, layer or file, and a sentence."""

    rule: str
    tensor: str
    text: str


@dataclass
class Checked:
    """A checkpoint with everything that rules look at."""

    found: Checkpoint
    layers: Mapping[str, Layer]
    alone: Mapping[str, Mapping[str, Stored]]
    promises: Promises | None
    whole: bool = False
    sizes: dict[str, float] = field(default_factory=dict)  # root mean square of sampled weights, by layer

    @property
    def narrow(self) -> list[Layer]:
        """The narrow layers."""
        return [layer for layer in self.layers.values() if layer.is_narrow]


Rule = Callable[[Checked], Iterator[Finding]]


def files(c: Checked) -> Iterator[Finding]:
    """Headers that cannot be trusted, and tensors that the index lists in vain."""
    for name, sentence in c.found.faults:
        yield Finding("damaged-file", name, sentence)
    damaged = {name for name, _ in c.found.faults}
    for name, file in c.found.settings.get("weight_map", {}).items():
        if name not in c.found.tensors and not {name, file} & damaged:
            yield Finding("missing-tensor", name, f"the index lists it in {file}, which does not have it")


def promised(c: Checked) -> Iterator[Finding]:
    """Layers that contradict the configuration."""
    p = c.promises
    if p is None:
        if "model_type" in c.found.settings and not c.found.is_gguf and c.narrow:
            kinds = {layer.kind for layer in c.narrow}
            words = ", ".join(sorted(kinds))
            text = f"{len(c.narrow)} layers are {words}, and config.json has no quantization_config"
            yield Finding("no-config", "config.json", text)
        return
    if not c.narrow:
        yield Finding(
            "nothing-narrow", "config.json", f"it promises {p.method or 'quantized'}, and no tensor is narrow"
        )
        return
    roles = {layer.role for layer in c.narrow}
    for layer in c.layers.values():
        said = p.of(layer.name)
        if not layer.is_narrow:
            is_matrix = len(layer.codes.shape) >= 2 and is_projection(layer.name)
            if said and is_matrix and (p.method in ("compressed-tensors", "modelopt") or layer.role in roles):
                text = f"it is stored as {layer.codes.dtype}, and the configuration calls it narrow"
                yield Finding("promised-narrow", layer.name, text)
        elif said is None and p.ignores(layer.name):
            text = f"it is stored as {layer.kind}, and an ignore rule leaves it out"
            yield Finding("ignored-narrow", layer.name, text)
        elif said and said.kind and said.kind != layer.kind:
            text = f"it is stored as {layer.kind}, and the configuration promises {said.kind}"
            yield Finding("other-format", layer.name, text)
        elif said and said.input and said.input not in layer.parts:
            name = "input_scale" if said.input == "input" else "input_global_scale"
            text = f"the configuration quantizes its activations with a stored scale, and it has no {name}"
            yield Finding("input-scale-missing", layer.name, text)
    for rule in p.useless(c.layers):
        yield Finding(
            "ignore-matches-nothing", rule, "no layer and no module of the checkpoint has this name"
        )


def scales(c: Checked) -> Iterator[Finding]:
    """Scales that are missing, alone, of a wrong shape, or not positive."""
    for name, parts in c.alone.items():
        if "scale" in parts or "global" in parts or "scale_2" in parts:
            yield Finding("scale-alone", name, "it has scales, and no weight")
    for layer in c.layers.values():
        if not layer.is_narrow:
            if "scale" in layer.parts and not c.found.is_gguf:
                text = f"it has scales, and its weight is stored as {layer.codes.dtype}"
                yield Finding("scale-alone", layer.name, text)
            elif layer.codes.dtype == "U8" and len(layer.codes.shape) >= 2 and is_projection(layer.name):
                yield Finding("scale-missing", layer.name, "its codes are U8, without a scale")
            continue
        if layer.codes.dtype in TYPES:
            yield from _numbers(layer, "its blocks", ggml_scales(layer, c.whole), is_above=False)
        elif "scale" not in layer.parts and layer.kind == "fp8":
            yield Finding("scale-missing", layer.name, f"its codes are {layer.codes.dtype}, without a scale")
        elif layer.kind == "nvfp4" and not {"scale_2", "global"} & layer.parts.keys():
            text = "it has scales of its blocks, and no scale of the tensor"
            yield Finding("scale-missing", layer.name, text)
        yield from _shape(layer, c.promises)
        for part, is_above in (("scale", False), ("scale_2", True), ("global", True)):
            tensor = layer.parts.get(part)
            if tensor is not None and tensor.dtype != "I32":
                is_above = is_above or layer.kind == "fp8"
                yield from _numbers(layer, tensor.name, scale_rows(tensor, c.whole), is_above)


def _numbers(layer: Layer, name: str, numbers: Floats | None, is_above: bool) -> Iterator[Finding]:
    if numbers is None:
        return
    if not np.isfinite(numbers).all():
        count = int((~np.isfinite(numbers)).sum())
        yield Finding(
            "scale-nan", layer.name, f"{count} of {numbers.size} scales in {name} are NaN or infinite"
        )
    elif (numbers < 0).any() and layer.kind not in ("int",) and layer.codes.dtype not in TYPES:
        count = int((numbers < 0).sum())
        yield Finding("scale-sign", layer.name, f"{count} of {numbers.size} scales in {name} are negative")
    elif is_above and not numbers.any():
        yield Finding("scale-sign", layer.name, f"all scales in {name} are 0")


def _shape(layer: Layer, promises: Promises | None) -> Iterator[Finding]:
    """Scales that are not one for each block of the layout, or of the configuration."""
    shape, columns = layer.scale_shape(), layer.columns()
    if shape is None or layer.kind not in _BLOCKS or layer.codes.dtype in (*TYPES, "F4"):
        return
    rows, block = layer.codes.shape[:-1], _BLOCKS[layer.kind]
    if layer.codes.shape[-1:] == (16,) and len(layer.codes.shape) > 2:
        rows, columns = layer.codes.shape[:-2], layer.codes.shape[-2] * 32
    said = promises.of(layer.name) if promises else None
    block = said.group if said and said.group and said.kind == layer.kind else block
    if int(np.prod(shape)) != int(np.prod(rows)) * -(-columns // block):
        text = f"scales of shape {shape} for rows of {columns} elements in blocks of {block}"
        yield Finding("scale-shape", layer.name, text)


def samples(c: Checked) -> Iterator[Finding]:
    """Sampled weights: NaN, magnitudes that no trained network has, codes that carry little."""
    for layer in c.narrow:
        sample = layer.sample(c.whole)
        if sample is None:
            continue
        if np.isnan(sample.codes).any():
            count = int(np.isnan(sample.codes).sum())
            text = f"{count} of {sample.codes.size} sampled codes are NaN"
            yield Finding("nan-codes", layer.name, text)
        yield from _magnitudes(layer, sample, c)
        yield from _shares(layer, sample)


def _magnitudes(layer: Layer, sample: Sample, c: Checked) -> Iterator[Finding]:
    with np.errstate(over="ignore", invalid="ignore"):
        values, inverted = sample.values, sample.inverted
    if values is None or inverted is None:
        return
    finite = values[np.isfinite(values)]
    if not finite.size or not finite.any():
        return
    largest = float(finite.max())
    c.sizes[layer.name] = float(np.sqrt(np.mean(np.square(finite, dtype=np.float64))))
    if _SMALLEST <= largest <= _LARGEST:
        return
    backward = inverted[np.isfinite(inverted)]
    other = float(backward.max()) if backward.size else 0.0
    if _SMALLEST <= other <= _LARGEST:
        text = (
            f"its largest sampled weight is {largest:.2g}, and {other:.2g} with the reciprocal of its scale"
        )
        yield Finding("scale-inverted", layer.name, text)
    else:
        yield Finding("scale-range", layer.name, f"its largest sampled weight is {largest:.2g}")


def _shares(layer: Layer, sample: Sample) -> Iterator[Finding]:
    size = sample.codes.size
    top, zero = (sample.codes == sample.largest).sum() / size, (sample.codes == 0).sum() / size
    if size >= 1024 and top > _SATURATED.get(layer.kind, 0.6):
        text = f"{top:.0%} of {size} sampled codes are the largest of the format"
        yield Finding("codes-saturated", layer.name, text)
    if size >= 1024 and _ZERO < zero < 1:
        yield Finding("codes-zero", layer.name, f"{zero:.1%} of {size} sampled codes are 0")


def outliers(c: Checked) -> Iterator[Finding]:
    """Layers whose weights are far from the same role's in other blocks; runs after `samples`."""
    roles: dict[str, list[str]] = {}
    for name in c.sizes:
        roles.setdefault(c.layers[name].role, []).append(name)
    for names in roles.values():
        middle = float(np.median([c.sizes[name] for name in names]))
        for name in names if len(names) >= _OF_A_ROLE and middle > 0 else ():
            factor = c.sizes[name] / middle
            if not 1 / _OUTLIER <= factor <= _OUTLIER:
                text = f"its weights are {factor:.2g} times the median of {len(names)} layers of its role"
                yield Finding("scale-outlier", name, text)


def inputs(c: Checked) -> Iterator[Finding]:
    """Scales of activations that no network needs."""
    for layer in c.narrow:
        for part, tensor in layer.parts.items():
            if not part.startswith("input"):
                continue
            numbers, reach = floats(tensor), 2688.0 if layer.kind in ("nvfp4", "NVFP4") else 448.0
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
                scale = 1 / numbers if part == "input_global" else numbers
                most = np.float64(np.max(scale))
                as_read, inverse = float(most * reach), float(reach / most)
            if not np.isfinite(scale).all() or (scale <= 0).any():
                yield Finding("input-scale", layer.name, f"{tensor.name} is not a positive number")
            elif not _SMALLEST_INPUT <= as_read <= _LARGEST_INPUT:
                hint = _LIKELY_INPUT[0] <= inverse <= _LIKELY_INPUT[1]
                more = f", and {inverse:.2g} with its reciprocal" if hint else ""
                yield Finding(
                    "input-scale", layer.name, f"{tensor.name} reaches activations of {as_read:.2g}{more}"
                )


def fused(c: Checked) -> Iterator[Finding]:
    """Layers that servers fuse, and that differ in precision or in the scale of the tensor."""
    for siblings in [] if c.found.is_gguf else _FUSED:
        for name, first in c.layers.items():
            head, _, last = name.rpartition(".")
            if last != siblings[0]:
                continue
            group = [c.layers.get(f"{head}.{other}") for other in siblings]
            present = [layer for layer in group if layer is not None]
            kinds = [layer.kind for layer in present]
            if len(set(kinds)) > 1:
                words = ", ".join(f"{layer.role} {layer.kind}" for layer in present)
                yield Finding(
                    "fused-precision", name, f"servers fuse it with others, and they differ: {words}"
                )
                continue
            for part in ("scale_2", "global", "input", "input_global") if first.kind == "nvfp4" else ():
                held = [layer.parts[part] for layer in present if part in layer.parts]
                numbers = {float(np.max(floats(tensor))) for tensor in held}
                if len(numbers) > 1 and np.isfinite(list(numbers)).all():
                    words = " to ".join(f"{x:.4g}" for x in (min(numbers), max(numbers)))
                    ending = held[0].name.rpartition(".")[2]
                    text = f"{ending} of {', '.join(siblings)} is {words}, and a fused layer has one"
                    yield Finding("fused-scales", name, text)


RULES: tuple[Rule, ...] = (files, promised, scales, samples, outliers, inputs, fused)
