"""The keys of a cast, each declared once: its default, its values, and what takes it.

A key is a field of `Keys`, with the name and the default that it has in a recipe's table; `cast.Cast` is such
a record with a name. `Taker` lists everything that takes casts: the places of a recipe, the engines that
compute a cast, and a few questions about its values. A taker takes the keys that are declared for it and
refuses all others (`Cast.unsupported`): one that is new is refused everywhere until it says who takes it.
What keys need of each other is in `cast_rules.py`.

**The differentiable estimator** (FP4, arXiv 2501.17116). The straight-through estimator treats rounding as
having slope 1 everywhere. This one approximates rounding on the interval of width d between two neighbours of
the grid by

    f(t) = d/2 (1 + sign(u) |u|^(1/k)),   u = 2 t / d - 1      t from the lower neighbour

and multiplies the weight's gradient by its slope |u|^(1/k - 1) / k. The slope is 1/k on the grid, rises to
infinity half way between two points, where rounding jumps, and is limited by a cap
(`stages.estimator`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Flag, auto
from typing import Any, NamedTuple

from narrowgauge.formats import RANDOM_BITS, ROUNDINGS, Format

SCALES = ("none", "fp32", "bf16", "e8m0", "e4m3", "e5m3")
ROUNDED = ("bf16", "e4m3", "e5m3")  # formats to which the quotient amax / max is rounded
E8M0_RULES = ("floor", "ceil", "even", "rceil")
CODEBOOKS = ("dynamic", "dynamic-unsigned")


class Taker(Flag):
    """What takes a cast, and the keys that are declared for it."""

    # Places of a recipe.
    OPERAND = auto()  # of a GEMM
    SOURCE = auto()  # an operand whose values another GEMM uses
    KEPT = auto()  # fprop.x, whose operand is kept for the backward pass
    SAVED = auto()  # the input of a layer, kept for the backward pass in a cast
    ATTENTION = auto()
    STREAM = auto()
    STATE = auto()
    GATHER = auto()
    REDUCE = auto()
    # Engines.
    TORCH = auto()  # the reference, in torch operations
    C = auto()  # the passes of a CPU
    OPERATOR = auto()  # the same in a graph that torch compiles for a CPU
    KERNEL = auto()  # Triton, in one pass over a matrix
    ROWS = auto()  # Triton, for scaled rows
    ADAMW = auto()  # Triton, for state
    NATIVE = auto()  # torch's scaled GEMMs, which read only codes and scales
    # Questions: a value of the key leaves the answer "yes".
    ANY_AXIS = auto()  # Are the values the same whichever axis is contracted?
    TOKENWISE = auto()  # Does the operand of a token depend on that token alone?
    MEMORYLESS = auto()  # Does nothing depend on earlier steps?
    SAME_NOISE = auto()  # Are the values nearly the same as without the key?
    SAME_LAYOUT = auto()  # Do codes and scales represent the values as without the key?
    SAME_FORWARD = auto()  # Are the values of a forward pass the same as without the key?


T = Taker
_LAYER = T.OPERAND | T.SOURCE | T.KEPT | T.TORCH | T.C | T.OPERATOR | T.ANY_AXIS
_CODES = _LAYER | T.SAVED | T.ATTENTION | T.STREAM | T.STATE | T.NATIVE | T.TOKENWISE | T.MEMORYLESS
_CHOSEN = _CODES | T.SAME_LAYOUT  # keys that choose codes and scales, and not what these represent
_TRANSFORM = T.OPERAND | T.TORCH | T.C | T.OPERATOR | T.MEMORYLESS
_STATE = T.STATE | T.TORCH | T.ANY_AXIS
_WIRE = T.GATHER | T.REDUCE
_FUSED = T.KERNEL | T.ROWS
_OVER_TIME = _LAYER | T.KERNEL | T.NATIVE | T.TOKENWISE | T.SAME_NOISE | T.SAME_LAYOUT
_ESTIMATOR = _LAYER | _FUSED | T.NATIVE | T.TOKENWISE | T.MEMORYLESS | T.SAME_LAYOUT | T.SAME_FORWARD


class Key(NamedTuple):
    """The declaration of a key.

    Attributes:
        takers: What takes it.
        among: The names that it takes; () for a key without a fixed list.
        word: What errors call it; "" for its name.
        kind: The types of its value in a recipe's table; () for a key that only named casts have.
    """

    takers: Taker
    among: tuple[str | None, ...] = ()
    word: str = ""
    kind: Any = None


def key(
    default: Any, takers: Taker, among: tuple[str | None, ...] = (), word: str = "", kind: Any = None
) -> Any:
    """A field of `Keys`; `kind` is the default's type, that of a number any number's."""
    if kind is None:
        kind = int | float if isinstance(default, float) else type(default)
    return field(default=default, metadata={"key": Key(takers, among, word, kind)})


@dataclass(frozen=True, kw_only=True)
class Keys:
    """The keys, in the order in which casts are written.

    Scales are computed in `scales.py`, candidates are compared in `narrow.py`, and what happens to a
    tensor before its blocks get scales is in `transforms.py`.
    """

    #: The format of the elements.
    element: Format = field(metadata={"key": Key(_CODES | _FUSED | T.ADAMW | _WIRE, kind=str)})
    #: "none" (plain conversion: bf16, fp16, fp32), or the format of the block scales: "fp32", "bf16", "e8m0"
    #: (OCP MX), "e4m3", "e5m3" (UE5M3).
    scale: str = key("none", _CODES | _FUSED | T.ADAMW | _WIRE, SCALES)
    #: "none", or the extent of an outer scale in fp32: "tensor" (NVFP4), "row" of an operand, or a number of
    #: columns of a row, such as "128".
    tensor_scale: str = key(
        "none", _CODES | T.KERNEL, ("none", "tensor", "row"), "tensor scale", kind=str | int
    )
    #: The target of the largest block scale under an outer scale; 0 means 448, or 256 with candidates.
    scale_target: float = key(0.0, _CHOSEN | T.KERNEL)
    #: How scales in bf16, e4m3 and e5m3 are rounded: a name of `formats.ROUNDINGS`.
    scale_rounding: str = key("nearest-even", _CHOSEN, ROUNDINGS, "scale rounding")
    #: What a scale that rounds to 0 becomes: "one" or "zero" (the block is zeros), or "smallest" (the
    #: smallest positive value); "" means "zero" in NVFP4, else "one".
    zero_scale: str = key("", _CHOSEN | T.SAME_NOISE, ("", "one", "zero", "smallest"), "zero scale")
    #: Element magnitudes, such as (6, 4), that a block's amax may be mapped to (4/6; arXiv 2512.02010): each
    #: block is quantized with all of them and keeps the best. () for only the largest element.
    candidates: tuple[float, ...] = key((), _CHOSEN, kind=list | tuple)
    #: "mae" or "mse" (mean absolute or squared error of the block), or "max" (its largest error): what
    #: decides among candidates; ties go to the first. "" without candidates.
    choose: str = key("", _CHOSEN, ("", "mae", "mse", "max"), "choice")
    #: "momentum" puts the rounding error of a weight that has no master into the first moment (ECO;
    #: `optim.feedback`); "" does not.
    feedback: str = key("", _STATE | T.C | T.MEMORYLESS, ("", "momentum"))
    #: The place whose values are used instead of the tensor's own, such as "fprop.w".
    of: str = key("", _LAYER | T.KERNEL | T.MEMORYLESS)
    #: The share of channels (columns, as stored) that are kept in `keep_cast`, the largest by norm; 0 for
    #: none. The rest of the tensor has zeros there, and the kept part has zeros everywhere else
    #: (`stages.channels`).
    keep_channels: float = key(0.0, T.OPERAND | T.SOURCE | T.TORCH | T.C | T.TOKENWISE)
    #: The name of their cast. Alone, in wgrad.dy: the cast in which the output gradient meets the channels
    #: that wgrad.x keeps.
    keep_cast: str = key("", _LAYER | T.KERNEL | T.TOKENWISE | T.MEMORYLESS)
    #: The number of steps whose values determine a layer's channels.
    keep_steps: int = key(1, _LAYER | T.KERNEL | T.NATIVE | T.TOKENWISE)
    #: 0 chooses them once, n again every n steps.
    keep_every: int = key(0, _LAYER | T.KERNEL | T.NATIVE | T.TOKENWISE)
    #: 0 measures the amax of an outer scale in every step; n measures it once every n steps and holds it in
    #: between. `nn.histories` keeps what lasts from step to step.
    refresh: int = key(
        0, _LAYER | T.NATIVE | T.SAME_NOISE | T.SAME_LAYOUT
    )  # kernels measure the amax themselves
    #: "tokens" subtracts the mean over tokens before quantization and adds it to the operand in high
    #: precision, or "" for none. The residual has a smaller range than x, and the mean is a single row.
    center: str = key("", _TRANSFORM | T.SOURCE | T.ANY_AXIS, ("", "tokens"))
    #: The name of a cast that rounds the mean to nearest, as a separate row: blocks lie along its channels;
    #: "" keeps it wide.
    center_cast: str = key("", _TRANSFORM | T.SOURCE | T.ANY_AXIS)
    #: "projection" multiplies the scales of a Hadamard group (of a block, without a transform) by the factor
    #: that makes the projection of its values on themselves exact (MS-EDEN), before `scale_rounding` rounds
    #: them; elements are rounded under the nearest scale. "" for none.
    correct: str = key("", _CHOSEN, ("", "projection"), "correction")
    #: (rows, columns) that share a scale, columns along the axis that a GEMM contracts, 0 for all of them;
    #: None for the full tensor.
    block: tuple[int, int] | None = key(None, _CODES | _FUSED, kind=str | int | list | tuple)
    #: How the power of two of an "e8m0" scale is chosen: "floor", "ceil", "even" or "rceil".
    scale_rule: str | None = key(None, _CHOSEN | T.KERNEL, (*E8M0_RULES, None), "scale rule", kind=str)
    #: How elements are rounded to the grid of their format: a name of `formats.ROUNDINGS`.
    rounding: str = key("nearest-even", _CHOSEN | _FUSED | T.ADAMW, ROUNDINGS)
    #: The number of elements in a group of the Hadamard transform along the contraction (`stages.hadamard`);
    #: 0 for none.
    hadamard: int = key(0, _TRANSFORM | T.ATTENTION | T.NATIVE | T.KERNEL | T.TOKENWISE)
    #: The share of the largest element that scales aim at. 16/17 makes NVFP4 free of clipping, because
    #: rounding a scale to E4M3 lowers it by at most 1/17; above 1, the largest values are clipped.
    headroom: float = key(1.0, _CHOSEN | _FUSED)
    #: Whether an "fp32" encoding scale is rounded down to a power of two.
    power_of_two: bool = key(False, _CHOSEN | T.KERNEL | T.ADAMW | _WIRE)
    #: () for the signs of the size (TransformerEngine's for 16, else all +1), "random" for new ones in each
    #: step, or one +1 or -1 for each element of a group.
    signs: tuple[int, ...] | str = key(
        (), _TRANSFORM | T.ATTENTION | T.NATIVE | T.KERNEL | T.TOKENWISE | T.ANY_AXIS, kind=str | list | tuple
    )
    #: Random bits per element of stochastic rounding: 24 is unbiased, 8 matches sm_100.
    random_bits: int = key(RANDOM_BITS, _CHOSEN | _FUSED | T.ADAMW | _WIRE)
    #: 0 computes the scale from the tensor itself, n from its amax in the last n steps (delayed scaling).
    history: int = key(0, _OVER_TIME)
    #: "max" of the history, or its "most_recent" entry.
    history_algorithm: str = key("max", _OVER_TIME, ("max", "most_recent"), "history algorithm")
    #: With a history, the number of binades left free above the amax.
    margin: int = key(0, _OVER_TIME)
    #: The quantile beyond which a tensor is clamped, on both sides (`stages.clamp`); 0 for no clamp.
    outliers: float = key(0.0, _TRANSFORM | T.SOURCE | T.SAVED | T.NATIVE | T.ROWS | T.SAME_LAYOUT)
    #: Whether the clamped remainder is added back in high precision.
    compensate: bool = key(False, _TRANSFORM | T.SOURCE | T.KEPT | T.ROWS | T.TOKENWISE | T.ANY_AXIS)
    #: Whether each block of state is first stretched to the format's full range (`stages.state`).
    expand: bool = key(False, _STATE | T.C | T.MEMORYLESS)
    #: The table that codes of state index, one of `CODEBOOKS`, or "" for none; with a table, the element
    #: only specifies the width of a code.
    codebook: str = key("", _STATE | T.MEMORYLESS, kind=())
    #: Whether the scale of a stored gradient is multiplied by a factor that adapts to the room it needs
    #: (`state.prescale`).
    prescale: bool = key(False, _STATE | T.KERNEL | T.C | T.ADAMW | T.REDUCE)
    #: The k of the differentiable gradient estimator of a weight; 0 for the straight-through estimator.
    estimator_k: float = key(0.0, _ESTIMATOR)
    #: Its largest slope.
    estimator_cap: float = key(3.0, _ESTIMATOR)
    #: The name of a custom function that gives the values (`register_cast`); "" for none.
    function: str = key("", T.OPERAND | T.SOURCE | T.TORCH, kind=())


#: The declaration of each key.
KEYS: Mapping[str, Key] = {f.name: f.metadata["key"] for f in fields(Keys)}
