"""Questions for a library, one property of a format each, with the exact answers.

A case is a small float32 matrix made for a cast, so that the property decides: `ties` holds every value
halfway between two neighbours of the element format, in blocks whose scale is 1 under every rule. The
answers come from the oracle in exact rational arithmetic. A second kind of case asks what stored codes
and scales mean, and a third draws from a library's stochastic rounding.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np

from narrowgauge.formats import Format, format
from narrowgauge.quantization import make_cast
from oracle import reference_quantize
from oracle.rounding import code_of, round_scalar

Table = Mapping[str, Any]
Array = np.ndarray
DRAWS = 4096  # of each value whose stochastic rounding is asked for

_ELEMENTS = ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1")
_MX = {"mxfp8": "e4m3", "mxfp8-e5m2": "e5m2", "mxfp6-e3m2": "e3m2", "mxfp6-e2m3": "e2m3", "mxfp4": "e2m1"}
_RULES = ("floor", "even", "rceil", "ceil")
#: name -> the keys of a cast. Without `scale`: a conversion of single values, which saturates or does not.
FORMATS: dict[str, Table] = {
    **{f"{e} element": {"element": e, "saturates": True} for e in (*_ELEMENTS, "e4m3fnuz", "e5m2fnuz")},
    **{f"{e} element, overflow": {"element": e, "saturates": False} for e in ("e4m3", "e5m2")},
    "e8m0 element": {"element": "e8m0", "saturates": True},
    "fp8 tensor": {"element": "e4m3", "block": "tensor", "scale": "fp32"},
    "fp8 row": {"element": "e4m3", "block": "row", "scale": "fp32"},
    "fp8 1x128": {"element": "e4m3", "block": 128, "scale": "fp32"},
    **{
        f"{name} {rule}": {"element": e, "block": 32, "scale": "e8m0", "scale_rule": rule}
        for name, e in _MX.items()
        for rule in _RULES
    },
    "mxint8 floor": {"element": "int8", "block": 32, "scale": "e8m0", "scale_rule": "floor"},
    "nvfp4": {"element": "e2m1", "block": 16, "scale": "e4m3", "tensor_scale": "tensor"},
    "nvfp4, no tensor scale": {"element": "e2m1", "block": 16, "scale": "e4m3"},
}


@dataclass(frozen=True, slots=True)
class Case:
    """A question and its answer.

    Attributes:
        format: A name of `FORMATS`.
        name: The property that it is about.
        asks: "quantize", "dequantize" or "stochastic".
        cast: The keys of a cast as an adapter reads them (`block` as [rows, columns]).
        x: The values; none for "dequantize".
        codes: The bit patterns of the elements, as asked or as expected.
        scales: The bit patterns of the scales, or their values if they are float32; none for single values.
        tensor_scale: The outer scale, or 1.
        values: What the codes stand for: the answer, in float32.
    """

    format: str
    name: str
    asks: str
    cast: Table
    x: Array | None
    codes: Array
    scales: Array
    tensor_scale: float
    values: Array


def cases(name: str) -> Iterator[Case]:
    """Yield all cases of a format."""
    table = FORMATS[name]
    element = format(table["element"])
    for case, x in _inputs(table, element).items():
        if "scale" in table:
            yield _scaled(name, case, table, x)
        else:
            yield _single(name, case, table, element, x)
    if table.get("scale") == "e8m0":
        yield from _stored(name, table, element, {"decode": range(1, 252)})
        yield from _stored(name, table, element, {"decode, scale 0": [0], "decode, scale NaN": [255]})
    elif table.get("scale") == "e4m3":
        yield from _stored(name, table, element, {"decode": range(127), "decode, scale NaN": [127]})
    if element.has_negative_zero and table.get("scale_rule") != "ceil":  # whose scale of the anchor is 2
        yield _drawn(name, table, element)


@cache
def grid(name: str) -> Array:
    """The finite values of a format that are not negative, in order."""
    fmt = format(name)
    if fmt.name == "e8m0":
        return np.array([2.0**e for e in range(-127, 128)])
    if fmt.twos_complement:
        return np.arange(2 ** (fmt.bits - 1)) * fmt.smallest_subnormal
    steps = 2**fmt.mantissa_bits
    found = [m / steps * 2.0 ** (1 - fmt.bias) for m in range(steps)]
    e = 1
    while (first := 2.0 ** (e - fmt.bias)) <= fmt.max:
        found += [first * (1 + m / steps) for m in range(steps) if first * (1 + m / steps) <= fmt.max]
        e += 1
    return np.array(found)


def noise(shape: tuple[int, ...], seed: int) -> Array:
    """Bell-shaped numbers with 20 bits: sums of four numbers of a linear congruential generator."""
    state, out = seed * 7919 + 1, []
    for _ in range(math.prod(shape)):
        total = 0
        for _ in range(4):
            state = (1103515245 * state + 12345) % 2**31
            total += state >> 13
        out.append((total - 2**19) / 2**18)
    return np.array(out).reshape(shape)


def to(x: Array, name: str) -> Array:
    """Every number rounded to a format."""
    return np.vectorize(lambda v: round_scalar(v, format(name)), otypes=[np.float64])(x)


def in_bf16(shape: tuple[int, ...], seed: int) -> Array:
    """`noise`, rounded to bfloat16."""
    return to(noise(shape, seed), "bf16")


def _inputs(table: Table, element: Format) -> dict[str, Array]:
    """The matrix of each case, for blocks of a row."""
    points = grid(element.name)
    between, least = (points[1:] + points[:-1]) / 2, points[1] if element.zero else points[0]
    beside = [f for m in between for f in (_next(m, -1), _next(m, 1))]
    top, step = element.max, element.max - points[-2]
    inf, nan = math.inf, math.nan
    if "scale" not in table:
        signs = (1, -1) if element.signed else (1,)
        edges = [
            top,
            _next(top + step / 2, -1),
            top + step / 2,
            _next(top + step / 2, 1),
            top + step,
            4 * top,
        ]
        if element.name == "e8m0":
            edges, beside = [top, 1.5 * top], beside[1:]
        both = {
            "normal": np.abs(in_bf16((96,), 1)) if not element.signed else in_bf16((96,), 1),
            "ties": between if element.zero else between[1:],
            "next to ties": np.array(beside[: 2 * len(between)]),
            "subnormals": np.arange(0 if element.zero else 1, 33) * float(least) / 4,
            "max": np.array([v for v in edges if v < 3.4e38]),
            "infinity": np.array([inf]),
            "NaN": np.array([nan]),
        }
        asked = {k: np.array([s * v for s in signs for v in vs]).reshape(1, -1) for k, vs in both.items()}
        return asked | ({"zeros": np.array([[0.0, -0.0]])} if element.signed and element.zero else {})
    width = (table["block"] if isinstance(table["block"], int) else 64) or 64
    anchor = element.max if element.name != "int8" else 127 / 64
    normal = in_bf16((4, 2 * width), 2)
    bad, gone = normal.copy(), normal.copy()
    gone[1, 3], bad[0, 5], bad[2, -2] = nan, inf, -inf
    exponents = np.floor(in_bf16((4, 2), 3) * 12).repeat(width, 1)
    maxima = np.array([1, 1 - 2.0**-8, 1 + 2.0**-7, 1.0625, 1.125, 1.1875, 1.25, 1.5, 1.875, 1.9921875]) * top
    made = {
        "normal": normal,
        "ties": _anchored([*between, *-between], anchor, width),
        "subnormals": _anchored(np.arange(-16, 17) * float(least) / 4, anchor, width),
        "max": _anchored([], 0, width, [float(round_scalar(m, format("bf16"))) for m in maxima]),
        "zeros": np.concatenate([np.where(normal > 0, 0.0, -0.0)[:2], normal[:2] * (normal[:2] > 0.5)]),
        "infinity": bad,
        "NaN": gone,
        "amax 1e-8": normal * 2.0**-27,
        "amax 1e-20": normal * 2.0**-67,
        "amax 1e-37": normal * 2.0**-123,
        "amax below 2^-126": normal * 2.0**-128,
        "amax 1e38": normal * 2.0**126,
        "unlike blocks": normal * 2.0**exponents,
    }
    if (
        table.get("scale") == "e4m3"
    ):  # blocks whose scale is one of the few smallest, so that it rounds far down
        coarse = [
            [a * 2.0**-9, *(in_bf16((width - 1,), i + 9) * a * 2.0**-10)]
            for i, a in enumerate((6.2, 7.4, 8.6, 20))
        ]
        made["coarse scales"] = np.array(coarse)
    if table.get("tensor_scale"):  # tensor scale 1, so that a block's scale is its amax / 6
        for case in ("ties", "subnormals", "max", "coarse scales"):
            first = np.zeros((1, made[case].shape[1]))
            first[0, 0] = 6.0 * 448
            made[case] = np.concatenate([first, made[case]])
    return {k: _rounded(_of_pairs(v) if width == 16 else v) for k, v in made.items()}


def _of_pairs(x: Array) -> Array:
    """Two blocks of 16 in a row at least, as some libraries demand."""
    if x.shape[1] > 16:
        return x
    even = np.concatenate([x, x[-1:]]) if len(x) % 2 else x
    return even.reshape(-1, 32)


def _next(v: float, way: int) -> float:
    """The float32 beside a value."""
    return float(np.nextafter(np.float32(v), np.float32(way * math.inf)))


def _rounded(x: Array) -> Array:
    """Every finite value as bfloat16 holds it, so that no library's input dtype matters."""
    return np.vectorize(lambda v: round_scalar(v, format("bf16")) if np.isfinite(v) else v, otypes=[float])(x)


def _anchored(values: Any, anchor: float, width: int, anchors: Any = ()) -> Array:
    """Rows of one block, each with its largest value first."""
    if len(anchors):
        rows = [[a, *(in_bf16((width - 1,), i + 9) * a / 3)] for i, a in enumerate(anchors)]
        return np.array(rows)
    parts = [list(values[i : i + width - 1]) for i in range(0, len(values), width - 1)]
    return np.array([[anchor, *part, *[0.0] * (width - 1 - len(part))] for part in parts])


def _facts(table: Table, x: Array) -> Table:
    """The keys as the vectors have them: the block as [rows, columns], 0 for all, none for the tensor."""
    facts = {k: v for k, v in table.items() if k != "block"} | {"input": "fp32"}
    if "scale" in table and table["block"] != "tensor":
        facts["block"] = [1, 0 if table["block"] == "row" else table["block"]]
    return facts


def _scaled(name: str, case: str, table: Table, x: Array) -> Case:
    hand = reference_quantize(x, make_cast(dict(table)), -1)
    scales = np.array(list(hand.scales.values()))
    if table["scale"] != "fp32":
        scales = np.array([code_of(float(s), format(table["scale"])) for s in scales])
    return Case(
        *(name, case, "quantize", _facts(table, x), x.astype(np.float32), hand.codes, scales),
        *(hand.tensor_scale, hand.dequantize().astype(np.float32)),
    )


def _single(name: str, case: str, table: Table, element: Format, x: Array) -> Case:
    values = np.vectorize(lambda v: _converted(v, element, table["saturates"]), otypes=[float])(x)
    codes = np.array([_code(float(v), element) for v in values.flat]).reshape(x.shape)
    facts = _facts(table, x)
    return Case(name, case, "quantize", facts, x.astype(np.float32), codes, np.empty(0), 1.0, values)


def _converted(v: float, element: Format, saturates: bool) -> float:
    """OFP8's conversion in one of its two modes; formats without infinity and NaN only saturate."""
    if math.isinf(v) and saturates and element.signed:
        return math.copysign(element.max, v)
    if not saturates and math.isfinite(v) and abs(v) > element.max:
        step = element.max - grid(element.name)[-2]
        middle = Fraction(element.max) + Fraction(step) / 2
        is_odd = (
            code_of(element.max, element) % 2 == 1
        )  # then the even neighbour of the middle is the one above
        if Fraction(abs(v)) > middle or (Fraction(abs(v)) == middle and is_odd):
            return math.copysign(math.inf, v) if element.has_infinity else math.nan
    if math.isnan(v) and element.nan_code is None:
        return math.nan
    return round_scalar(v, element)


def _code(v: float, element: Format) -> int:
    if math.isinf(v):
        assert element.infinity_code is not None
        return element.infinity_code + (v < 0) * 2 ** (element.bits - 1)
    return -1 if math.isnan(v) and element.nan_code is None else code_of(v, element)


def _stored(name: str, table: Table, element: Format, asked: Mapping[str, Any]) -> Iterator[Case]:
    """Every element code under the scales asked for, a row for each."""
    points = grid(element.name)
    finite = [code_of(float(s * v), element) for s in (1, -1) for v in points]
    scale = format(table["scale"])
    for case, chosen in asked.items():
        rows = list(chosen)
        width = -(-min(len(finite), 64) // 32) * 32  # whole blocks of 16 and of 32
        codes = np.array(
            [[finite[(r * 7 + i) % len(finite)] for i in range(width)] for r in range(len(rows))]
        )
        numbers = {code_of(float(s * v), element): s * v for s in (1, -1) for v in points}
        values = np.vectorize(numbers.__getitem__, otypes=[float])(codes)
        known = grid(scale.name) if scale.zero else [2.0 ** (c - 127) for c in range(255)]
        factors = np.array([math.nan if c >= len(known) else known[c] for c in rows])
        scales = np.array(rows).reshape(-1, 1).repeat(width // table["block"], 1)
        with np.errstate(over="ignore", under="ignore"):
            answer = (values * factors[:, None]).astype(np.float32)
        facts = _facts(table, codes)
        yield Case(name, case, "dequantize", facts, None, codes, scales.reshape(-1), 1.0, answer)


def _drawn(name: str, table: Table, element: Format) -> Case:
    """Values between neighbours, each many times, under the scale 1; `values` has their shares of the gap."""
    points = grid(element.name)
    chosen = points[[0, 1, 2, len(points) // 2, -3, -2]]
    above = points[[1, 2, 3, len(points) // 2 + 1, -2, -1]]
    shares = np.array([0.125, 0.25, 0.5, 0.625, 0.75, 0.875])
    x = (chosen + (above - chosen) * shares).reshape(-1, 1).repeat(DRAWS, 1)
    x = np.concatenate([x, -x])
    if "scale" in table:
        width = table["block"] if isinstance(table["block"], int) else DRAWS
        x[:, ::width] = element.max
        if table.get("tensor_scale"):
            x = np.concatenate([x, np.full((1, DRAWS), 0.0)])
            x[-1, 0] = 6.0 * 448
    empty = np.empty(0)
    return Case(
        *(name, "stochastic", "stochastic", _facts(table, x), x.astype(np.float32)),
        *(np.stack([chosen, above, shares]), empty, 1.0, empty),
    )
