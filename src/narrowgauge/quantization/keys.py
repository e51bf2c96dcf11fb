"""The keys of a cast, each declared once: its default, its values, and its consumers.

A key is a field of `Keys`, with the name and the default that it has in a recipe's table; `cast.Cast` is such
a record with a name. `Consumer` lists everything that reads casts: the places of a recipe, the engines that
compute a cast, and a few questions about its values. A consumer supports the keys that are declared for it
and refuses all others (`Cast.unsupported`): a new key is refused everywhere until it names its consumers.
What keys need of each other stands in their rules, which `require_valid` checks.

**The differentiable estimator** (FP4, arXiv 2501.17116). The straight-through estimator treats rounding as
having slope 1 everywhere. This one approximates rounding on the interval of width d between two neighbours of
the grid by

    f(t) = d/2 (1 + sign(u) |u|^(1/k)),   u = 2 t / d - 1      t from the lower neighbour

and multiplies the weight's gradient by its slope |u|^(1/k - 1) / k. The slope is 1/k on the grid, rises to
infinity half way between two points, where rounding jumps, and is limited by a cap
(`quantize.estimator_slope`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import Flag, auto
from typing import Any, NamedTuple

from narrowgauge.formats import RANDOM_BITS, ROUNDINGS, Format, format
from narrowgauge.system.errors import UserError, unknown

SCALES = ("none", "fp32", "bf16", "e8m0", "e4m3", "e5m3")
ROUNDED = ("bf16", "e4m3", "e5m3")  # formats to which the quotient amax / max is rounded
E8M0_RULES = ("floor", "ceil", "even", "rceil")


class Consumer(Flag):
    """What reads a cast, and refuses the keys that are not declared for it."""

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


C = Consumer
_LAYER = C.OPERAND | C.SOURCE | C.KEPT | C.TORCH | C.C | C.OPERATOR | C.ANY_AXIS
_CODES = _LAYER | C.SAVED | C.ATTENTION | C.STREAM | C.STATE | C.NATIVE | C.TOKENWISE | C.MEMORYLESS
_CHOSEN = _CODES | C.SAME_LAYOUT  # keys that choose codes and scales, and not what these represent
_TRANSFORM = C.OPERAND | C.TORCH | C.C | C.OPERATOR | C.MEMORYLESS
_STATE = C.STATE | C.TORCH | C.ANY_AXIS
_WIRE = C.GATHER | C.REDUCE
_FUSED = C.KERNEL | C.ROWS
_OVER_TIME = _LAYER | C.KERNEL | C.NATIVE | C.TOKENWISE | C.SAME_NOISE | C.SAME_LAYOUT
_ESTIMATOR = _LAYER | _FUSED | C.NATIVE | C.TOKENWISE | C.MEMORYLESS | C.SAME_LAYOUT | C.SAME_FORWARD


class Key(NamedTuple):
    """The declaration of a key."""

    consumers: Consumer  # what supports it
    among: tuple[str | None, ...] = ()  # the names that it takes; () for a key without a fixed list
    word: str = ""  # what errors call it; "" for its name
    kind: Any = None  # the types of its value in a recipe's table; () for a key that only named casts have


def key(
    default: Any, consumers: Consumer, among: tuple[str | None, ...] = (), word: str = "", kind: Any = None
) -> Any:
    """A field of `Keys`; `kind` is the default's type, that of a number any number's."""
    if kind is None:
        kind = int | float if isinstance(default, float) else type(default)
    return field(default=default, metadata={"key": Key(consumers, among, word, kind)})


@dataclass(frozen=True, kw_only=True)
class Keys:
    """The keys, in the order in which casts are written.

    Scales are computed in `scales.py`, candidates are compared in `passes`, and what happens to a
    tensor before its blocks get scales is in `transforms.py`.
    """

    #: The format of the elements.
    element: Format = field(metadata={"key": Key(_CODES | _FUSED | C.ADAMW | _WIRE, kind=str)})
    #: "none" (plain conversion: bf16, fp16, fp32), or the format of the block scales: "fp32", "bf16", "e8m0"
    #: (OCP MX), "e4m3", "e5m3" (UE5M3, unsigned, up to 61440). A recipe's table has "fp32" by default.
    scale: str = key("none", _CODES | _FUSED | C.ADAMW | _WIRE, SCALES)
    #: "none", or the extent of an outer scale in fp32: "tensor" (NVFP4), "row" of an operand, or a number of
    #: columns of a row, such as "128".
    tensor_scale: str = key(
        "none", _CODES | C.KERNEL, ("none", "tensor", "row"), "tensor scale", kind=str | int
    )
    #: The target of the largest block scale under an outer scale; 0 means 448, or 256 with candidates.
    scale_target: float = key(0.0, _CHOSEN | C.KERNEL)
    #: How scales in bf16, e4m3 and e5m3 are rounded: a name of `formats.ROUNDINGS`.
    scale_rounding: str = key("nearest-even", _CHOSEN, ROUNDINGS, "scale rounding")
    #: What a scale that rounds to 0 becomes: "one" or "zero" (the block is zeros), or "smallest" (the
    #: smallest positive value); "" means "zero" in NVFP4, else "one".
    zero_scale: str = key("", _CHOSEN | C.SAME_NOISE, ("", "one", "zero", "smallest"), "zero scale")
    #: Element magnitudes, such as (6, 4), that a block's amax may be mapped to (4/6; arXiv 2512.02010): each
    #: block is quantized with all of them and keeps the best. () for only the largest element.
    candidates: tuple[float, ...] = key((), _CHOSEN, kind=list | tuple)
    #: "mae" or "mse" (mean absolute or squared error of the block), or "max" (its largest error): what
    #: decides among candidates; ties go to the first. "" without candidates.
    choose: str = key("", _CHOSEN, ("", "mae", "mse", "max"), "choice")
    #: "momentum" puts the rounding error of a weight that has no master into the first moment (ECO;
    #: `optim.adamw`); "" does not.
    feedback: str = key("", _STATE | C.C | C.MEMORYLESS, ("", "momentum"))
    #: The place whose values are used instead of the tensor's own, such as "fprop.w".
    of: str = key("", _LAYER | C.KERNEL | C.MEMORYLESS)
    #: The share of channels (columns, as stored) that are kept in `keep_cast`, the largest by norm; 0 for
    #: none. The rest of the tensor has zeros there, and the kept part has zeros everywhere else
    #: (`transforms`).
    keep_channels: float = key(0.0, C.OPERAND | C.SOURCE | C.TORCH | C.C | C.TOKENWISE)
    #: The name of their cast. Alone, in wgrad.dy: the cast in which the output gradient meets the channels
    #: that wgrad.x keeps.
    keep_cast: str = key("", _LAYER | C.KERNEL | C.TOKENWISE | C.MEMORYLESS)
    #: The number of steps whose values determine a layer's channels.
    keep_steps: int = key(1, _LAYER | C.KERNEL | C.NATIVE | C.TOKENWISE)
    #: 0 chooses them once, n again every n steps.
    keep_every: int = key(0, _LAYER | C.KERNEL | C.NATIVE | C.TOKENWISE)
    #: 0 measures the amax of an outer scale in every step; n measures it once every n steps and holds it in
    #: between. `nn.histories` keeps what lasts from step to step.
    refresh: int = key(
        0, _LAYER | C.NATIVE | C.SAME_NOISE | C.SAME_LAYOUT
    )  # kernels measure the amax themselves
    #: "tokens" subtracts the mean over tokens before quantization and adds it to the operand in high
    #: precision, or "" for none. The residual has a smaller range than x, and the mean is a single row.
    center: str = key("", _TRANSFORM | C.SOURCE | C.ANY_AXIS, ("", "tokens"))
    #: The name of a cast that rounds the mean to nearest, as a separate row: blocks lie along its channels;
    #: "" keeps it wide.
    center_cast: str = key("", _TRANSFORM | C.SOURCE | C.ANY_AXIS)
    #: "projection" multiplies the scales of a Hadamard group (of a block, without a transform) by the factor
    #: that makes the projection of its values on themselves exact (MS-EDEN), before `scale_rounding` rounds
    #: them; elements are rounded under the nearest scale. "" for none.
    correct: str = key("", _CHOSEN, ("", "projection"), "correction")
    #: (rows, columns) that share a scale, columns along the axis that a GEMM contracts, 0 for all of them;
    #: None for the full tensor, which is the default. "row" is (1, 0), and n is (1, n).
    block: tuple[int, int] | None = key(None, _CODES | _FUSED, kind=str | int | list | tuple)
    #: How the power of two of an "e8m0" scale is chosen: "floor", "ceil", "even" or "rceil".
    scale_rule: str | None = key(None, _CHOSEN | C.KERNEL, (*E8M0_RULES, None), "scale rule", kind=str)
    #: How elements are rounded to the grid of their format: a name of `formats.ROUNDINGS`.
    rounding: str = key("nearest-even", _CHOSEN | _FUSED | C.ADAMW, ROUNDINGS)
    #: The number of elements in a group of the Hadamard transform along the contraction (`transforms`);
    #: 0 for none.
    hadamard: int = key(0, _TRANSFORM | C.ATTENTION | C.NATIVE | C.KERNEL | C.TOKENWISE)
    #: The share of the largest element that scales aim at. 16/17 makes NVFP4 free of clipping, because
    #: rounding a scale to E4M3 lowers it by at most 1/17; above 1, the largest values are clipped.
    headroom: float = key(1.0, _CHOSEN | _FUSED)
    #: Whether an "fp32" encoding scale is rounded down to a power of two.
    power_of_two: bool = key(False, _CHOSEN | C.KERNEL | C.ADAMW | _WIRE)
    #: () for the signs of the size (TransformerEngine's for 16, else all +1), "random" for new ones in each
    #: step, or one +1 or -1 for each element of a group.
    signs: tuple[int, ...] | str = key(
        (), _TRANSFORM | C.ATTENTION | C.NATIVE | C.KERNEL | C.TOKENWISE | C.ANY_AXIS, kind=str | list | tuple
    )
    #: Random bits per element of stochastic rounding: 24 is unbiased, 8 matches sm_100.
    random_bits: int = key(RANDOM_BITS, _CHOSEN | _FUSED | C.ADAMW | _WIRE)
    #: 0 computes the scale from the tensor itself, n from its amax in the last n steps (delayed scaling).
    history: int = key(0, _OVER_TIME)
    #: "max" of the history, or its "most_recent" entry.
    history_algorithm: str = key("max", _OVER_TIME, ("max", "most_recent"), "history algorithm")
    #: With a history, the number of binades left free above the amax.
    margin: int = key(0, _OVER_TIME)
    #: The quantile beyond which a tensor is clamped, on both sides (`transforms`); 0 for no clamp.
    outliers: float = key(0.0, _TRANSFORM | C.SOURCE | C.SAVED | C.NATIVE | C.ROWS | C.SAME_LAYOUT)
    #: Whether the clamped remainder is added back in high precision.
    compensate: bool = key(False, _TRANSFORM | C.SOURCE | C.KEPT | C.ROWS | C.TOKENWISE | C.ANY_AXIS)
    #: Whether each block of state is first stretched to the format's full range (`state.quantized_state`).
    expand: bool = key(False, _STATE | C.C | C.MEMORYLESS)
    #: The table that codes of state index, a name of `code_values`, or "" for none; with a table, the element
    #: only specifies the width of a code.
    codebook: str = key("", _STATE | C.MEMORYLESS, kind=())
    #: Whether the scale of a stored gradient is multiplied by a factor that adapts to the room it needs
    #: (`state.gradient_state`).
    prescale: bool = key(False, _STATE | C.KERNEL | C.C | C.ADAMW | C.REDUCE)
    #: The k of the differentiable gradient estimator of a weight; 0 for the straight-through estimator.
    estimator_k: float = key(0.0, _ESTIMATOR)
    #: Its largest slope.
    estimator_cap: float = key(3.0, _ESTIMATOR)
    #: The name of a custom function that gives the values (`register_cast`); "" for none.
    function: str = key("", C.OPERAND | C.SOURCE | C.TORCH, kind=())


#: The declaration of each key.
KEYS: Mapping[str, Key] = {f.name: f.metadata["key"] for f in fields(Keys)}
#: (key, whether its value is valid, the rule as a clause), which holds for a value other than the default.
Rule = tuple[str, bool, str]
_ALWAYS = ("scale", "scale_rule")  # keys that other keys need, so that their default may be wrong


def require_valid(cast: Any) -> None:
    """Refuse a cast with an unknown name, a value out of bounds, or incompatible keys."""
    for name, key in KEYS.items():
        value = "row" if name == "tensor_scale" and cast.outer_columns else getattr(cast, name)
        if key.among and value not in key.among:
            raise unknown(key.word or name, str(value), filter(None, key.among))
    for name, is_right, rule in (*_rules_of_scales(cast), *_rules_of_values(cast)):
        if not is_right and (name in cast.changed_keys or name in _ALWAYS):
            value = getattr(cast, name)
            shown = value.name if isinstance(value, Format) else value
            raise UserError(f"cast {cast.name!r}: {name} = {shown!r}, but {rule}")


def _rules_of_scales(c: Any) -> Iterator[Rule]:
    """The rules of elements, blocks, scales and candidates."""
    bits, fp32, is_rounded = c.element.bits, c.scale == "fp32", c.scale in ROUNDED
    rows, columns = c.block or (0, 0)
    rounded = ", ".join(ROUNDED)
    rounds = f"it belongs to scales in {rounded}, which are rounded to their format"
    of_rounded, fixed = f"they belong to scales in {rounded}", "they need blocks of a fixed size, such as 16"
    is_wide_right = not c.is_scaled or (fp32 and c.block is None and bits == 16)
    wide = "elements of more than a byte have no scale, or with 16 bits one in fp32 a tensor"
    a_row = "a row needs several blocks, and a block one row; name a block such as 16"
    whole = "this must be a whole number of blocks; name a multiple of the block's columns"
    group = "it needs blocks of one row that divide the size of the Hadamard transform, such as 16"
    largest, aims = c.element.max, "of the rules for E8M0 scales only rceil has a largest element to aim at"
    among = len(c.candidates) != 1 and all(0 < one <= largest for one in c.candidates)
    e8m0 = f"a scale rule belongs to E8M0 scales only; name one of {', '.join(E8M0_RULES)} there, or none"
    under = f"it is what scales in {rounded} aim at under a tensor scale; leave it out"
    function = "the function is the whole cast; leave the other keys out"
    yield "function", not (c.is_scaled or c.is_transformed), function
    yield "element", c.element.signed, "it is a format of scales; write it as the key scale"
    yield "scale", c.is_scaled or bits > 8, f"narrow elements need one; name {', '.join(SCALES[1:])}"
    yield "scale", c.is_scaled or c.block is None, "a block shares a scale; name one, or leave block out"
    yield "scale", bits <= 8 or is_wide_right, wide
    yield "block", min(rows, columns) >= 0, "its rows and columns are positive numbers"
    yield (
        "tensor_scale",
        not is_rounded or c.block is not None,
        "the block is the tensor; name a smaller block",
    )
    yield "tensor_scale", not c.has_row_scales or c.block is None or (rows == 1 and columns != 0), a_row
    yield "tensor_scale", not columns or c.outer_columns % columns == 0, whole
    yield "headroom", not c.history, "a history leaves room by its margin"
    yield "candidates", among, f"two or more numbers above 0 and not above {largest:g} are needed"
    yield "candidates", is_rounded, of_rounded
    yield "candidates", columns != 0, fixed
    yield "correct", not is_rounded or (rows == 1 and columns != 0 and c.hadamard % columns == 0), group
    yield "scale_rule", (c.scale == "e8m0") == bool(c.scale_rule), e8m0
    yield "tensor_scale", is_rounded, f"it stands over block scales in {rounded}, as nvfp4 has them"
    yield "scale_target", c.tensor_scale != "none", under
    in_format = f"it must lie above 0 and not above {c.scale}'s largest number"
    yield "scale_target", not is_rounded or 0 <= c.scale_target <= format(c.scale).max, in_format
    yield "scale_rounding", is_rounded, rounds
    yield "zero_scale", is_rounded, rounds
    yield "headroom", 0 < c.headroom <= 2, "it must lie above 0 and not above 2"
    yield "headroom", c.scale != "e8m0" or c.scale_rule == "rceil", aims
    yield "power_of_two", fp32, "it cuts scales in fp32; leave it out"
    yield "correct", is_rounded, rounds
    yield "random_bits", 1 <= c.random_bits <= RANDOM_BITS, f"it must lie in 1 to {RANDOM_BITS}"
    yield "candidates", bool(c.choose), "a choice is missing; add choose = 'mae'"
    yield "choose", bool(c.candidates), "there are no candidates; add candidates = [6, 4]"


def _rules_of_values(c: Any) -> Iterator[Rule]:
    """The rules of what happens before blocks get scales, of amaxes over time, and of state."""
    fp32, is_tensor, size, signs = c.scale == "fp32", c.block is None, c.hadamard, c.signs
    share = "it is a share of channels, above 0 and below 1"
    nothing = "without keep_channels there is nothing to choose; leave it out"
    is_signs = signs in ((), "random") or (len(signs) == size and set(signs) <= {1, -1})
    some_signs = '"random" or one +1 or -1 for each element of a group are possible'
    of_tensor = (
        "histories, outliers and estimators are of the whole tensor; leave out history, refresh, outliers "
        "and estimator_k"
    )
    with_mean = "outliers and histories are of the tensor with its mean; leave one of them out"
    held = (
        "it holds the largest magnitude under tensor_scale = 'tensor', and scales of this cast are "
        "current; leave it out"
    )
    as_it_comes = "what is held is of the tensor as it comes; leave out hadamard, center and outliers"
    is_map = fp32 and c.rounding == "nearest-even" and not c.expand
    is_byte = fp32 and is_tensor and not c.history and c.element.bits == 8
    yield "keep_channels", 0 <= c.keep_channels < 1, share
    yield "keep_channels", bool(c.keep_cast), "their cast is missing; add keep_cast"
    yield "keep_steps", c.keep_steps >= 1, "it is a number of steps, one or more"
    yield "keep_steps", bool(c.keep_channels), nothing
    yield "keep_every", bool(c.keep_channels), nothing
    yield "keep_every", c.keep_every >= c.keep_steps, "it is a number of steps, at least keep_steps"
    yield "center_cast", bool(c.center), "no mean is taken away; add center = 'tokens'"
    yield "hadamard", size > 1 and not size & (size - 1), "it must be 0 or a power of two"
    yield "signs", is_signs, some_signs
    yield "outliers", 0.5 < c.outliers < 1, "it must be 0 or a quantile such as 0.99"
    yield "refresh", c.refresh > 1, "it is a number of steps, two or more"
    yield "history", c.history >= 0, "it must be a number of steps"
    yield "margin", 0 <= c.margin < 64, "it must lie in 0 to 63"
    yield "estimator_k", c.estimator_k >= 1, "it must be 0, or at least 1"
    yield "estimator_cap", c.estimator_cap > 0, "it must be positive"
    yield "keep_cast", c.is_scaled, "the cast itself is wide; leave the key out"
    yield "keep_channels", not (c.history or c.refresh or c.outliers or c.estimator_k), of_tensor
    yield "center", c.is_scaled, "it is for narrow elements; leave it out"
    yield "center", not (c.outliers or c.history), with_mean
    yield "refresh", c.tensor_scale == "tensor", held
    yield "refresh", not c.is_transformed, as_it_comes
    yield "history", fp32 and is_tensor, "it needs one fp32 scale a tensor"
    yield "estimator_k", fp32, "it needs fp32 scales"
    yield "expand", fp32 and not is_tensor, "it needs fp32 scales of blocks, as fp8-1x128 has"
    yield "codebook", is_map, "a map has fp32 scales and takes the nearest number"
    yield "prescale", is_byte, "it needs codes of a byte under one fp32 scale a tensor, as e4m3 has"
