"""Each instruction that the executor of PTX knows, against an oracle that is not the executor.

Conversions of 8 and 16 bits are exhaustive, against ml_dtypes and torch; sums and multiplications are
compared with exact fractions, integers with Python's.
"""

import math
import random
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from ptx.machine import ELEMENTWISE, run
from ptx.memory import Global
from ptx.parse import parse
from ptx.types import width

REGISTER = {1: "%rs", 2: "%rs", 4: "%r", 8: "%rd"}
HEAD = """.visible .entry tried(.param .u64 in, .param .u64 out)
.reqntid 128
{
	.reg .pred %p<9>;
	.reg .b16 %rs<9>;
	.reg .b32 %r<30>;
	.reg .b64 %rd<30>;
	ld.param.b64 %rd10, [in];
	ld.param.b64 %rd11, [out];
	mov.u32 %r10, %tid.x;
	mov.u32 %r11, %ctaid.x;
	shl.b32 %r12, %r11, 7;
	add.s32 %r12, %r12, %r10;
	mul.wide.u32 %rd12, %r12, 8;
	add.s64 %rd13, %rd10, %rd12;
	add.s64 %rd14, %rd11, %rd12;
"""


def executed(body, values, blocks=1, shared=1024):
    """What a kernel of 128 threads a block writes, 8 bytes a thread, from 8 bytes of each (uint64)."""
    given = torch.from_numpy(np.ascontiguousarray(values).view(np.int64))
    out = torch.zeros(128 * blocks, dtype=torch.int64)
    addresses = [given.data_ptr(), out.data_ptr()]
    run(parse(f"{HEAD}{body}\tret;\n}}\n"), (blocks, 1, 1), addresses, shared, Global([given, out]))
    return out.numpy().view(np.uint64)


def computed(opcode, *columns):
    """The bits of `opcode` of columns of bits, one element a thread."""
    opcode, _, _ = opcode.partition(" of ")
    does = ELEMENTWISE.get(f"{opcode} of {len(columns)}") or ELEMENTWISE[opcode]
    n = len(columns[0])
    blocks = -(-n // 128)
    given = np.zeros((len(columns), blocks * 128), dtype=np.uint64)
    given[:, :n] = columns
    lines, sources = [], []
    for i, kind in enumerate(does.sources):
        register = f"%p{i}" if kind == "pred" else f"{REGISTER[width(kind)]}{i}"
        lines.append(f"ld.global.b64 %rd20, [%rd13+{8 * i * blocks * 128}]; cvt.u32.u64 %r20, %rd20;")
        lines.append(
            {
                "%p": f"setp.ne.b32 {register}, %r20, 0;",
                "%rs": f"cvt.u16.u32 {register}, %r20;",
                "%r": f"mov.b32 {register}, %r20;",
                "%rd": f"mov.b64 {register}, %rd20;",
            }[register.rstrip("0123456789")]
        )
        sources.append(register)
    if does.result == "pred":
        store = "selp.b32 %r21, 1, 0, %p8; cvt.u64.u32 %rd21, %r21;"
        target = "%p8"
    else:
        target = REGISTER[width(does.result)] + "8"
        to_32 = f"cvt.u32.u16 %r21, {target};" if target == "%rs8" else f"mov.b32 %r21, {target};"
        store = f"mov.b64 %rd21, {target};" if target == "%rd8" else f"{to_32} cvt.u64.u32 %rd21, %r21;"
    lines += [f"{opcode} {target}, {', '.join(sources)};", store, "st.global.b64 [%rd14], %rd21;"]
    return executed("\n".join(lines), given.reshape(-1), blocks)[:n]


def bits_of(values):
    """Floating-point values as their bits, every NaN one NaN."""
    values = np.where(np.isnan(values), np.array(np.nan, dtype=values.dtype), values)
    return values.view(f"u{values.dtype.itemsize}").astype(np.uint64)


def floats(bits, dtype):
    return bits.astype(f"u{np.dtype(dtype).itemsize}").view(dtype)


EVERY_16 = np.arange(2**16, dtype=np.uint64)
EVERY_BF16 = (EVERY_16.astype(np.uint32) << 16).view(np.float32)
#: Around all numbers of bf16, and all of float16: there, midway to the next, and next to both.
BETWEEN = np.concatenate(
    [(EVERY_16.astype(np.uint32) << 16) + np.uint32(rest) for rest in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
).view(np.float32)
AROUND_HALVES = EVERY_16.astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
AROUND_HALVES = np.concatenate([AROUND_HALVES + np.uint32(r) for r in (0, 1, 0xFFF, 0x1000, 0x1001)])
AROUND_HALVES = AROUND_HALVES.view(np.float32)
FP8 = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def saturated_codes(x, name):
    """By ml_dtypes; NaN is 0x7F in both formats."""
    most = float(ml_dtypes.finfo(FP8[name]).max)
    with np.errstate(invalid="ignore"):
        codes = np.clip(x, -most, most).astype(FP8[name]).view(np.uint8)
    return np.where(np.isnan(x), 0x7F, codes).astype(np.uint64)


@pytest.mark.parametrize("name", FP8)
def test_fp8_of_float32_is_rounded_once(name):
    x = np.concatenate([EVERY_BF16, AROUND_HALVES[::7]])
    found = computed(f"cvt.rn.satfinite.{name}x2.f32", bits_of(x), bits_of(x[::-1]))
    assert np.array_equal(found, saturated_codes(x, name) << np.uint64(8) | saturated_codes(x[::-1], name))


def test_fp8_by_way_of_float16_is_rounded_twice():
    """As Triton 3.8 compiled it for Ada: the executor shows which codes are others."""
    x = np.random.default_rng(0).normal(0, 50, 2**15).clip(-448, 448).astype(np.float32)
    halves = computed("cvt.rz.f16x2.f32", bits_of(x), bits_of(x))
    codes = computed("cvt.rn.satfinite.e4m3x2.f16x2", halves) & np.uint64(0xFF)
    others = (codes != saturated_codes(x, "e4m3")).mean()
    assert 0.003 < others < 0.005


@pytest.mark.parametrize("name", FP8)
def test_fp8_of_every_float16_and_back(name):
    halves = EVERY_16.astype(np.uint16).view(np.float16)
    found = computed(f"cvt.rn.satfinite.{name}x2.f16x2", EVERY_16 | EVERY_16[::-1] << np.uint64(16))
    codes = saturated_codes(halves.astype(np.float32), name)
    assert np.array_equal(found, codes | codes[::-1] << np.uint64(8))
    back = computed(f"cvt.rn.f16x2.{name}x2", EVERY_16)
    for shift, of in ((0, 0), (8, 16)):
        expected = (EVERY_16 >> np.uint64(shift)).astype(np.uint8).view(FP8[name]).astype(np.float16)
        found = floats(back >> np.uint64(of) & np.uint64(0xFFFF), np.float16)
        assert np.array_equal(bits_of(found), bits_of(expected))


def test_bf16_and_float16_of_float32():
    of_torch = torch.from_numpy(BETWEEN).bfloat16().float().numpy()
    expected = np.where(np.isnan(BETWEEN), 0x7FFF, of_torch.view(np.uint32) >> 16).astype(np.uint64)
    assert np.array_equal(computed("cvt.rn.bf16.f32", bits_of(BETWEEN)), expected)
    pairs = computed("cvt.rn.bf16x2.f32", bits_of(BETWEEN), bits_of(BETWEEN[::-1]))
    assert np.array_equal(pairs, expected << np.uint64(16) | expected[::-1])
    halves = bits_of(torch.from_numpy(AROUND_HALVES).half().numpy())
    expected = np.where(np.isnan(AROUND_HALVES), 0x7FFF, halves).astype(np.uint64)
    assert np.array_equal(computed("cvt.rn.f16.f32", bits_of(AROUND_HALVES)), expected)
    pairs = computed("cvt.rn.f16x2.f32", bits_of(AROUND_HALVES), bits_of(AROUND_HALVES[::-1]))
    assert np.array_equal(pairs, expected << np.uint64(16) | expected[::-1])


def test_float16_toward_zero_is_the_last_number_not_beyond():
    x = AROUND_HALVES[np.isfinite(AROUND_HALVES)]
    found = floats(computed("cvt.rz.f16.f32", bits_of(x)), np.float16)
    assert (np.abs(found.astype(np.float64)) <= np.abs(x)).all()
    with np.errstate(over="ignore"):
        further = np.nextafter(found, np.where(np.signbit(x), -np.inf, np.inf).astype(np.float16))
    assert (np.abs(further.astype(np.float64)) > np.abs(x)).all()
    pairs = computed("cvt.rz.f16x2.f32", bits_of(x), bits_of(x))
    assert np.array_equal(pairs & np.uint64(0xFFFF), bits_of(found))
    assert np.array_equal(pairs >> np.uint64(16), bits_of(found))


def test_wider_is_exact():
    found = floats(computed("cvt.f32.bf16", EVERY_16), np.float32)
    assert np.array_equal(bits_of(found), bits_of(EVERY_BF16))
    halves = EVERY_16.astype(np.uint16).view(np.float16)
    found = floats(computed("cvt.f32.f16", EVERY_16), np.float32)
    assert np.array_equal(bits_of(found), bits_of(halves.astype(np.float32)))


# ---- one rounding, by exact fractions

SPECIAL = [0.0, -0.0, 1.0, -1.5, 2.0**-149, -(2.0**-126), 3.4028234663852886e38, 1 + 2.0**-23, 2.0**-133]
#: Precision, exponent of the least normal number, largest exponent; numpy's dtype or bf16.
FORMATS = {"f32": (24, -126, 127), "bf16": (8, -126, 127), "f16": (11, -14, 15)}


def rounded(exact, kind, down=False):
    """A fraction as the nearest (or next lower) value of a format, ties to even; beyond it infinity."""
    precision, least, most = FORMATS[kind]
    if exact == 0:
        return 0.0
    exponent = math.floor(math.log2(abs(exact.numerator))) - math.floor(math.log2(exact.denominator))
    while abs(exact) < Fraction(2) ** exponent:
        exponent -= 1
    while abs(exact) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    quantum = Fraction(2) ** (max(exponent, least) - precision + 1)
    whole = math.floor(exact / quantum) if down else round(exact / quantum)  # Python rounds ties to even
    value = whole * quantum
    if abs(value) >= Fraction(2) ** (most + 1):
        return math.copysign(math.inf, exact)
    return float(value)


def bits_in(values, kind):
    if kind == "f32":
        return bits_of(np.array(values, dtype=np.float32))
    if kind == "f16":
        with np.errstate(over="ignore"):
            return bits_of(np.array(values, dtype=np.float16))
    return bits_of(np.array(values, dtype=np.float32)) >> np.uint64(16)


def values_in(bits, kind):
    if kind == "bf16":
        return floats(bits << np.uint64(16), np.float32)
    return floats(bits, {"f32": np.float32, "f16": np.float16}[kind])


def drawn(kind, count, seed):
    """Numbers of a format: of like and unlike sizes, subnormal and extreme ones."""
    draw = random.Random(seed)
    _, least, most = FORMATS[kind]
    sizes = [*range(-3, 4), least - 3, least, least // 2, most // 2, most]
    values = [draw.choice((-1, 1)) * draw.uniform(1, 2) * 2.0 ** draw.choice(sizes) for _ in range(count)]
    values[: len(SPECIAL)] = SPECIAL if kind == "f32" else [s if abs(s) > 1e-30 else 0.0 for s in SPECIAL]
    draw.shuffle(values)
    if kind == "bf16":
        values = [v if abs(v) < 2.0**127.9 else 1.0 for v in values]
        return values_in(bits_in(values, kind), kind)
    with np.errstate(over="ignore"):
        values = np.array(values, dtype=np.float32 if kind == "f32" else np.float16)
    return np.where(np.isfinite(values), values, values.dtype.type(1))


EXACT = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "fma": lambda x, y, z: x * y + z,
}


@pytest.mark.parametrize(
    ("name", "kind"), [(n, k) for n in EXACT for k in FORMATS if f"{n}.rn.{k}" in ELEMENTWISE]
)
def test_arithmetic_rounds_an_exact_result_once(name, kind):
    count, arity = 2000, EXACT[name].__code__.co_argcount
    columns = [drawn(kind, count, seed) for seed in range(arity)]
    if name == "div":
        columns[1] = np.where(columns[1] == 0, np.float32(3), columns[1])
    if name == "fma":  # half of them cancel
        with np.errstate(over="ignore"):
            near = -(columns[0].astype(np.float32) * columns[1].astype(np.float32))
        near = values_in(bits_in(np.where(np.isfinite(near), near, 1), kind), kind)
        near = np.where(np.isfinite(near), near, 1).astype(near.dtype)
        columns[2] = np.where(np.arange(count) % 2, near, columns[2])
    expected = [
        rounded(EXACT[name](*(Fraction(float(v)) for v in values)), kind)
        for values in zip(*columns, strict=True)
    ]
    bits = [bits_in(c, kind) for c in columns]
    found = values_in(computed(f"{name}.rn.{kind}", *bits), kind)
    assert np.array_equal(found.astype(np.float64), expected)
    packed = f"{name}.rn.{kind}x2"
    if packed in ELEMENTWISE:
        shift = np.uint64(32 if kind == "f32" else 16)
        both = computed(packed, *(b | b[::-1] << shift for b in bits))
        assert np.array_equal(both & (np.uint64(1) << shift) - np.uint64(1), bits_in(found, kind))
        assert np.array_equal(both >> shift, bits_in(found, kind)[::-1])


@pytest.mark.parametrize("kind", ["bf16", "f16"])
@pytest.mark.parametrize("name", ["add", "sub", "fma"])
def test_mixed_arithmetic_widens_and_rounds_once(name, kind):
    """`add.f32.bf16 d, a, c` of sm_100: the last operand is float32, those before it are narrow."""
    count, arity = 2000, EXACT[name].__code__.co_argcount
    columns = [drawn(kind, count, seed) for seed in range(arity - 1)] + [drawn("f32", count, arity)]
    with np.errstate(over="ignore"):  # half of the results cancel, up to a last bit of float32
        near = -columns[0].astype(np.float32) * (columns[1].astype(np.float32) if name == "fma" else 1)
        near = np.nextafter(near if name != "sub" else -near, np.float32(0))
    cancels = (np.arange(count) % 2 == 1) & np.isfinite(near)
    columns[-1] = np.where(cancels, near, columns[-1])
    exact = [EXACT[name](*(Fraction(float(v)) for v in values)) for values in zip(*columns, strict=True)]
    bits = [bits_in(c, kind) for c in columns[:-1]] + [bits_in(columns[-1], "f32")]
    found = values_in(computed(f"{name}.rn.f32.{kind}", *bits), "f32")
    assert np.array_equal(found.astype(np.float64), [rounded(e, "f32") for e in exact])


def test_a_fused_product_rounds_down_and_flushes():
    columns = [drawn("f32", 3000, seed) for seed in range(3)]
    flushed = [np.where(np.abs(c) < 2.0**-126, 0, c) for c in columns]
    exact = [
        Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)) for x, y, z in zip(*flushed, strict=True)
    ]
    expected = np.array([rounded(e, "f32", down=True) for e in exact])
    most = float(np.finfo(np.float32).max)
    expected = np.where(expected == np.inf, most, expected)  # down from beyond is the largest number
    expected = np.where(np.abs(expected) < 2.0**-126, 0, expected)
    found = floats(computed("fma.rm.ftz.f32", *map(bits_of, columns)), np.float32)
    assert np.array_equal(found.astype(np.float64), expected)
    near = floats(computed("fma.rn.ftz.f32", *map(bits_of, columns)), np.float32)
    expected = np.array([rounded(e, "f32") for e in exact])
    assert np.array_equal(near.astype(np.float64), np.where(np.abs(expected) < 2.0**-126, 0, expected))


def test_roots_bounds_and_counts():
    x = np.abs(drawn("f32", 2000, 0))
    root = floats(computed("sqrt.rn.f32", bits_of(x)), np.float32)
    for value, found in zip(x[:500], root[:500], strict=True):
        low, high = (Fraction(float(np.nextafter(found, np.float32(to)))) for to in (-np.inf, np.inf))
        middle = Fraction(float(found))
        assert ((low + middle) / 2) ** 2 <= Fraction(float(value)) <= ((middle + high) / 2) ** 2 or value == 0
    x = np.array([-1, -0.0, 2.0**-130, 0.25, 1, 7, np.inf, np.nan], dtype=np.float32)
    found = floats(computed("cvt.ftz.sat.f32.f32", bits_of(x)), np.float32)
    assert found.tolist() == [0, 0, 0, 0.25, 1, 1, 1, 0]
    x = np.array([-3e9, -2.5, -0.9, 2.9, 3e9, np.inf, np.nan, 2147483520], dtype=np.float32)
    found = computed("cvt.rzi.s32.f32", bits_of(x)).astype(np.uint32).view(np.int32)
    assert found.tolist() == [-(2**31), -2, 0, 2, 2**31 - 1, 2**31 - 1, 0, 2147483520]


@pytest.mark.parametrize("opcode", ["ex2.approx.f32", "ex2.approx.ftz.f32", "lg2.approx.f32"])
def test_an_approximation_is_within_the_documented_error_and_not_exact(opcode):
    x = np.random.default_rng(0).uniform(-100, 100, 4096).astype(np.float32)
    x = np.abs(x) if opcode.startswith("lg2") else x
    found = floats(computed(opcode, bits_of(x)), np.float32).astype(np.float64)
    exact = np.exp2(x.astype(np.float64)) if opcode.startswith("ex2") else np.log2(x.astype(np.float64))
    error = np.abs(found - exact)
    one = np.where((x > 0.5) & (x < 2) & opcode.startswith("lg2"), 1, np.abs(exact))
    assert (error <= one * (2.0**-22 + 2.0**-24)).all()  # and the rounding to float32
    assert (error > one * 2.0**-23).any()


COMPARISONS = {
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y and x == x and y == y,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
}
NUMBERS = [math.nan, -math.inf, -1.0, -0.0, 0.0, 2.0, math.inf]
PAIRS = [(x, y) for x in NUMBERS for y in NUMBERS]


def of_pairs(opcode):
    return computed(opcode, *(bits_of(np.array(c, dtype=np.float32)) for c in zip(*PAIRS, strict=True)))


def test_comparisons_of_floats_know_nan():
    for name, compare in COMPARISONS.items():
        has_nan = [math.isnan(x) or math.isnan(y) for x, y in PAIRS]
        expected = [compare(x, y) for x, y in PAIRS]
        assert of_pairs(f"setp.{name}.f32").astype(bool).tolist() == expected
        unordered = [e or nan for e, nan in zip(expected, has_nan, strict=True)]
        assert of_pairs(f"setp.{name}u.f32").astype(bool).tolist() == unordered
    assert of_pairs("setp.nan.f32").astype(bool).tolist() == has_nan
    assert of_pairs("setp.num.f32").astype(bool).tolist() == [not nan for nan in has_nan]


@pytest.mark.parametrize(("name", "sign"), [("min", 1), ("max", -1)])
def test_the_smaller_of_a_number_and_nan_is_the_number(name, sign):
    def key(x):
        return sign * x, sign * math.copysign(1, x)  # -0 is less than 0

    expected = []
    for x, y in PAIRS:
        numbers = [v for v in (x, y) if not math.isnan(v)]
        expected.append(min(numbers, key=key) if numbers else math.nan)
    found = of_pairs(f"{name}.f32")
    expected = np.array(expected, dtype=np.float32)
    assert np.array_equal(bits_of(floats(found, np.float32)), bits_of(expected))
    assert found[0] == 0x7FFFFFFF
