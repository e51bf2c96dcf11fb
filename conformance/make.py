"""Write the conformance vectors: `python conformance/make.py [FOLDER]`. README.md says what they are.

Inputs come from integers alone, expectations from the exact oracle; the same files come out anywhere.
"""

import json
import math
import struct
import sys
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from cases import noise, to
from narrowgauge.formats import Format, format, format_names
from narrowgauge.quantization import Cast, cast, cast_names, make_cast
from narrowgauge.recipes import GEMM_PLACES, recipe, recipe_names
from oracle import reference_quantize
from oracle.rounding import code_of, fl

SIGNS_32 = [1 - 2 * (0x9E3779B9 >> i & 1) for i in range(32)]
KEY = (0x12345678, -0x0FEDCBA9)
DEFAULT = cast("fp32")
Vector = dict[str, Any]
Seen = tuple[str, np.ndarray]  # the name of an operand's vector, and the numbers that it stands for
OF_SCALES = 0x5CA1AB1E  # into both words of a key: the random bits of scales


def delayed_scale_by_hand(amaxes: Sequence[float], c: Cast) -> float:
    """The encoding scale after steps with these amaxes, the newest last; 1 before the first."""
    history = [a for a in amaxes if a > 0 and math.isfinite(a)][-c.history :]
    if not history:
        return 1.0
    amax = max(history) if c.history_algorithm == "max" else history[-1]
    return float(fl(fl(Fraction(c.element.max) / 2**c.margin) / Fraction(amax)))


@cache
def inputs() -> dict[str, tuple[str, np.ndarray]]:
    """name -> (format, numbers)."""
    normal, exponents = to(noise((12, 40), 1), "bf16"), np.floor(noise((12, 40), 2) * 24)
    special = [
        0.0,
        -0.0,
        math.nan,
        math.inf,
        -math.inf,
        2.0**-133,
        -(2.0**-126),
        3.38e38,
        -1.0,
        448.0,
        464.0,
        6.0,
    ]
    special += [
        m * 2.0**e for e in (-10, -1, 0, 3) for m in (1, 1 + 2.0**-7, 2 - 2.0**-7, 1.25, 1.5, 1.75, -1.125)
    ]
    beside = [m * 2.0**e for e in (-20, 0, 9) for m in (1 - 2.0**-24, 1, 1 + 2.0**-23, 1.75, 1.5 + 2.0**-23)]
    bad = normal.copy()
    bad[1, 3], bad[4, 39], bad[9, 20] = math.nan, math.inf, -math.inf
    return {
        "normal": ("bf16", normal),
        "wide": ("bf16", to(normal * 2.0**exponents, "bf16")),
        "tiny": ("bf16", to(normal * 2.0**-124, "bf16")),
        "huge": ("bf16", to(normal * 2.0**126, "bf16")),
        "zeros": ("bf16", np.where(normal > 0, 0.0, -0.0)[:4]),
        "special": ("bf16", to(np.array(special), "bf16").reshape(1, 40)),
        "not finite": ("bf16", bad),
        "fp32": ("fp32", to(np.append(noise((11, 40), 3) * 0.01, (beside * 3)[:40]), "fp32").reshape(12, 40)),
        "long": ("bf16", to(noise((3, 200), 4), "bf16")),
        "tall": ("bf16", to(noise((130, 6), 5), "bf16")),
        "integers": ("bf16", np.clip(np.rint(noise((12, 40), 6) * 40), -127, 127) / 16),
        "x": ("bf16", np.clip(np.rint(noise((20, 36), 7) * 40), -127, 127) / 16),
        "w": ("bf16", np.clip(np.rint(noise((24, 36), 8) * 40), -127, 127) / 512),
        "dy": ("bf16", np.clip(np.rint(noise((20, 24), 9) * 40), -127, 127) / 4096),
    }


def bits(shape: tuple[int, ...], other: int = 0) -> np.ndarray:
    """24 random bits for each number: those that narrowgauge draws under KEY (formats/counter_rng.py)."""

    def mix(x: int) -> int:
        x = (x ^ x >> 16) * 0x21F0AAAD % 2**32
        x = (x ^ x >> 15) * 0xD35A2D97 % 2**32
        return x ^ x >> 15

    low, high = (k % 2**32 ^ other for k in KEY)
    drawn = [mix(mix(i ^ low) ^ high) >> 8 for i in range(math.prod(shape))]  # i < 2^32
    return np.array(drawn).reshape(shape)


def hexadecimal(numbers: np.ndarray, fmt: Format) -> str:
    """Codes of a format one after the other, two hex digits for each started byte."""
    digits = 2 * math.ceil(fmt.bits / 8)
    return "".join(f"{_code(float(v), fmt):0{digits}x}" for v in numbers.ravel())


def _code(value: float, fmt: Format) -> int:
    if fmt.name == "fp32":
        return int.from_bytes(struct.pack(">f", value))
    if math.isinf(value):
        assert fmt.infinity_code is not None
        return fmt.infinity_code + (value < 0) * 2 ** (fmt.bits - 1)
    return code_of(value, fmt)


def described(c: Cast) -> Vector:
    """A cast by its facts; what is at its default is left out."""
    every, default = ({"name": one.name, **one.values()} for one in (c, DEFAULT))
    every["element"] = c.element.name
    return {k: v for k, v in every.items() if v != default[k]} | {"element": c.element.name}


def vector(name: str, tensor: str, c: Cast, axis: int, full: bool = False, **given: object) -> Vector:
    """One vector: what was asked for and what has to come out."""
    return _vector(name, tensor, c, axis, full, None, **given)[0]


def _vector(
    name: str, tensor: str, c: Cast, axis: int, full: bool, of: Seen | None, **given: object
) -> tuple[Vector, np.ndarray | None]:
    """(a vector, the numbers that are stored); `of` is another operand whose numbers are the input."""
    dtype, x = inputs()[tensor]
    out: Vector = {"name": name, "input": tensor, "axis": axis, "cast": described(c)} | given
    if of is not None:
        out["of"], (dtype, x) = of[0], ("fp32", of[1])
    if not c.is_scaled:
        return out | {"codes": hexadecimal(to(x, c.element.name), c.element)}, None
    signs = given.get("signs", ())
    scale = given.get("encode_scale")
    amaxes = given.get("amaxes")
    if amaxes is not None:
        assert isinstance(amaxes, list)
        scale = delayed_scale_by_hand(amaxes, c)
        out["encode_scale"] = hexadecimal(np.array([scale]), format("fp32"))
    draws = scale_draws = None
    if c.is_random:
        padded = list(x.shape)
        if c.hadamard:
            padded[axis] += -padded[axis] % c.hadamard
        draws, scale_draws = bits(tuple(padded)), bits(tuple(padded), OF_SCALES)  # no block has two scales
        out |= {"key": list(KEY), "random": _drawn(draws) if full else None}
    hand = reference_quantize(x, c, axis, draws, signs, scale, dtype, scale_draws)  # type: ignore[arg-type]
    scales = np.array(list(hand.scales.values()))
    if c.scale_rounding == "stochastic" and full:
        assert scale_draws is not None
        out["scale_random"] = _drawn(scale_draws.ravel()[: len(scales)])
    stored = format("fp32" if c.scale == "fp32" else c.scale)
    codes = "".join(f"{code:02x}" for code in hand.codes.ravel())
    out |= {"codes": codes, "scales": hexadecimal(scales, stored)}
    if c.tensor_scale != "none":
        row = axis % x.ndim
        columns = c.outer_columns or x.shape[row]
        seconds = {(*k[:row], k[row] // columns, *k[row + 1 :]): s for k, s in hand.tensor_scales.items()}
        above = [s for _, s in sorted(seconds.items())] if c.has_row_scales else [hand.tensor_scale]
        out["tensor_scale"] = hexadecimal(np.array(above), format("fp32"))
    if c.compensate:
        out["rest"] = hexadecimal(hand.rest, format("fp32"))
    if c.center:
        out["mean"] = hexadecimal(np.array(hand.mean), format("fp32"))
    if hand.kept is not None:
        out["channels"], out["kept"] = list(hand.channels), hexadecimal(hand.kept, format("fp32"))
    if full:
        out["result"] = hexadecimal(hand.dequantize(), format("fp32"))
    return out, hand.dequantize()


def _drawn(draws: np.ndarray) -> str:
    """Six digits for the 24 bits of each."""
    return "".join(f"{d:06x}" for d in draws.ravel())


def cast_vectors() -> list[Vector]:
    """Every cast on every kind of input, and every option."""
    out = []
    for name in cast_names():
        c = cast(name)
        kinds = ["normal", "wide", "tiny", "huge", "zeros", "special", "not finite", "fp32"]
        kinds += ["long", "tall"] if c.block and 128 in c.block else []
        for kind in kinds if c.is_scaled else ["normal", "fp32"]:
            out.append(vector(f"{name} {kind}", kind, c, -1, kind == "normal"))
        if c.is_scaled:
            out.append(vector(f"{name} normal axis 0", "normal", c, 0))
        for rule in ("floor", "ceil", "even") if c.scale == "e8m0" else ():
            for kind in ("normal", "wide", "tiny"):
                out.append(
                    vector(f"{name} {rule} {kind}", kind, make_cast({"cast": name, "scale_rule": rule}), -1)
                )
    for name, table in FREE.items():
        c = make_cast(table)
        for kind in ("normal", "wide", "tiny", "huge", "special", "not finite"):
            out.append(vector(f"{name} {kind}", kind, c, -1, kind == "normal"))
        out.append(vector(f"{name} normal axis 0", "normal", c, 0))
    for name, tensor, options, given in OPTIONS:
        words = " ".join(f"{k}={v}" for k, v in options.items() if k != "signs")
        out.append(vector(f"{name} {words}", tensor, make_cast({"cast": name} | options), -1, True, **given))
    return out


# Casts that have no name, by the keys that they show.
FREE: dict[str, Vector] = {
    "int4-row": {"element": "int4", "block": "row"},
    "int4-1x32-bf16": {"element": "int4", "block": 32, "scale": "bf16"},
    "e1m2-1x32-e8m0": {"element": "e1m2", "block": 32, "scale": "e8m0"},
    "mxfp8 32x32": {"cast": "mxfp8", "block": [32, 32]},
    "e2m1-1x16-e5m3": {"element": "e2m1", "block": 16, "scale": "e5m3"},
    "e2m1-1x16-e5m3 per tensor": {"element": "e2m1", "block": 16, "scale": "e5m3", "tensor_scale": "tensor"},
    "e2m1-1x16-e4m3": {"element": "e2m1", "block": 16, "scale": "e4m3"},
    "e2m1-1x16-e4m3 smallest": {"element": "e2m1", "block": 16, "scale": "e4m3", "zero_scale": "smallest"},
    "e4m3-1x8-bf16": {"element": "e4m3", "block": 8, "scale": "bf16"},
    "nvfp4 per row": {"cast": "nvfp4", "tensor_scale": "row"},
    "nvfp4 target 256": {"cast": "nvfp4", "scale_target": 256},
    "nvfp4 six or four": {"cast": "nvfp4", "candidates": [6, 4], "choose": "max"},
    "e2m1-1x16-e5m3 six or four": {
        **{"element": "e2m1", "block": 16, "scale": "e5m3", "tensor_scale": "tensor"},
        **{"candidates": [6, 4], "choose": "mse"},
    },
    "nvfp4 headroom 1.0625": {"cast": "nvfp4", "headroom": 17 / 16},
}
MOST_RECENT = {"history": 4, "history_algorithm": "most_recent", "margin": 2}
OPTIONS: list[tuple[str, str, Vector, Vector]] = [
    ("e4m3", "wide", {"power_of_two": True}, {}),
    ("fp8-row", "wide", {"power_of_two": True}, {}),
    ("fp8-1x128", "long", {"power_of_two": True}, {}),
    ("nvfp4", "normal", {"headroom": 16 / 17}, {}),
    ("nvfp4-2d", "normal", {"headroom": 16 / 17}, {}),
    ("nvfp4", "wide", {"candidates": [6, 4], "choose": "mae"}, {}),
    ("nvfp4-2d", "normal", {"candidates": [6, 4], "choose": "mse"}, {}),
    ("nvfp4", "wide", {"tensor_scale": "row"}, {}),
    ("nvfp4", "long", {"tensor_scale": 64}, {}),
    ("nvfp4", "normal", {"center": "tokens"}, {}),
    ("nvfp4", "normal", {"center": "tokens", "center_cast": "nvfp4"}, {}),
    ("nvfp4", "normal", {"keep_channels": 0.1, "keep_cast": "mxfp8"}, {}),
    ("e4m3", "wide", {"keep_channels": 0.1, "keep_cast": "bf16"}, {}),
    (
        "nvfp4",
        "normal",
        {"correct": "projection", "scale_rounding": "stochastic", "scale_target": 255.99},
        {},
    ),
    ("nvfp4", "wide", {"candidates": [6, 4], "choose": "mse", "zero_scale": "one"}, {}),
    (
        "nvfp4",
        "wide",
        {
            **{"correct": "projection", "scale_rounding": "stochastic", "scale_target": 255.99},
            **{"headroom": 1.0120177103099304, "zero_scale": "one"},
        },
        {},
    ),
    ("nvfp4", "integers", {"correct": "projection", "hadamard": 32, "scale_target": 255.99}, {}),
    ("mxfp4", "normal", {"rounding": "half-away"}, {}),
    ("mxfp6-e2m3", "normal", {"rounding": "toward-zero"}, {}),
    ("mxfp4", "normal", {"rounding": "stochastic"}, {}),
    ("mxfp4", "normal", {"rounding": "stochastic", "random_bits": 8}, {}),
    ("nvfp4", "normal", {"rounding": "stochastic"}, {}),
    ("e5m2", "normal", {"rounding": "stochastic"}, {}),
    ("nvfp4", "integers", {"hadamard": 16}, {}),
    ("mxfp4", "integers", {"hadamard": 32, "signs": SIGNS_32}, {}),
    ("mxfp4", "integers", {"hadamard": 32, "signs": "random"}, {"signs": SIGNS_32}),
    ("nvfp4", "integers", {"hadamard": 16, "rounding": "stochastic"}, {}),
    ("nvfp4", "integers", {"hadamard": 16, "correct": "projection"}, {}),
    ("fp4-row", "normal", {"outliers": 0.97}, {}),
    ("fp4-row", "normal", {"outliers": 0.97, "compensate": True}, {}),
    ("e4m3", "normal", {"history": 3}, {"amaxes": [9.0, 2.0, 1.5, 3.25]}),
    (
        "e5m2",
        "normal",
        {"history": 4, "history_algorithm": "most_recent", "margin": 2},
        {"amaxes": [9.0, 0.7]},
    ),
]
# The operand of each place: which tensor, contracted along which axis.
OPERANDS = {
    "fprop.x": ("x", -1),
    "fprop.w": ("w", -1),
    "dgrad.dy": ("dy", -1),
    "dgrad.w": ("w", 0),
    "wgrad.dy": ("dy", 0),
    "wgrad.x": ("x", 0),
}


def recipe_vectors() -> Vector:
    """The six operands of every recipe; those that several share are there once."""
    operands: dict[str, tuple[Vector, np.ndarray | None]] = {}
    recipes: dict[str, dict[str, str | None]] = {}
    for name in recipe_names():
        places = recipes[name] = {}
        for place in GEMM_PLACES:
            tensor, axis = OPERANDS[place]
            c, of = recipe(name).casts[place], None
            if c.of and not c.is_scaled:  # the numbers of another place as they are
                places[place] = places[c.of]
                continue
            if c.of:
                first, numbers = next(v for v in operands.values() if v[0]["name"] == places[c.of])
                assert numbers is not None
                of = first["name"], numbers
            given: Vector = {"signs": SIGNS_32[: c.hadamard]} if c.signs == "random" else {}
            given |= {"amaxes": [0.5, 8.0, 3.0]} if c.history else {}
            key = json.dumps([tensor, axis, of and of[0], described(c)])
            if key not in operands:
                title = f"{tensor} {axis} {len(operands)}"
                try:
                    operands[key] = _vector(title, tensor, c, axis, False, of, **given)
                except ValueError:  # sums of its transform depend on their order
                    places[place] = None
                    continue
            places[place] = operands[key][0]["name"]
    return {"recipes": recipes, "operands": [v for v, _ in operands.values()]}


def main(folder: Path) -> None:
    """Write the three files."""
    stored = {
        n: {"format": f, "shape": list(x.shape), "codes": hexadecimal(x, format(f))}
        for n, (f, x) in inputs().items()
    }
    formats = {n: {"max": format(n).max, "smallest": format(n).smallest_subnormal} for n in format_names()}
    of_recipes = recipe_vectors()
    of_casts = {"vectors": cast_vectors()}
    files = {"inputs": {"formats": formats, "inputs": stored}, "casts": of_casts, "recipes": of_recipes}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(_lines(content), encoding="utf-8")


def _lines(content: dict[str, Any]) -> str:
    """JSON with a line for each entry of each part."""
    parts = []
    for part, entries in content.items():
        if isinstance(entries, dict):
            lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in entries.items()]
        else:
            lines = [json.dumps(v) for v in entries]
        opening, closing = "{}" if isinstance(entries, dict) else "[]"
        parts.append(f"{json.dumps(part)}: {opening}\n" + ",\n".join(lines) + f"\n{closing}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
