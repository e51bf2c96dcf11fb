"""All formats of at most 8 bits: each is served exactly, or refused in one sentence.

The oracle reads a value off its code in integers, value = n 2^(s - bias), and shares nothing with the
package. Between two neighbours every rounding is known without arithmetic: the codes are consecutive.
"""

import itertools

import numpy as np
import pytest
import torch

import narrowgauge as ng
from narrowgauge.formats import Format, Specials, decode, encode
from narrowgauge.system.errors import UserError

WIDTHS = [(signed, e, n - e) for signed in (True, False) for n in range(1, 9) for e in range(n + 1)]
WIDTHS = [(signed, e, m) for signed, e, m in WIDTHS if 2 <= signed + e + m <= 8]
BIASES = (-200, -126, -120, -30, -2, -1, 0, 1, 3, 7, 15, 64, 118, 126, 127, 150)
ROUNDINGS = ("nearest-even", "half-away", "toward-zero", "stochastic")
QUARTER = 0.25  # the random value of "stochastic"


def all_formats(bias):
    for (signed, e, m), specials in itertools.product(WIDTHS, Specials):
        yield Format, (f"s{signed:d}e{e}m{m}", e, m, bias, specials, signed), {}
    for bits in range(2, 9):
        yield Format, (f"i{bits}", 0, bits - 1, bias, Specials.NONE), {"twos_complement": True}


def kinds(e, m, specials):
    """(what each code without its sign stands for: "finite", "inf" or "nan"; n; s) as integers."""
    body = np.arange(2 ** (e + m))
    exponent, mantissa = body >> m, body & (2**m - 1)
    kind = np.full(body.shape, "finite", dtype=object)
    if specials is Specials.IEEE:
        kind[(exponent == 2**e - 1) & (mantissa == 0)] = "inf"
        kind[(exponent == 2**e - 1) & (mantissa != 0)] = "nan"
    if specials is Specials.NAN_ONLY:
        kind[-1] = "nan"
    return kind, mantissa + (exponent > 0) * 2**m, np.maximum(exponent, 1) - m


def contradicts(e, m, specials, signed):
    """Whether the special codes leave no number, or have no code of their own."""
    return (
        (specials is not Specials.NONE and e == 0)
        or (specials is Specials.IEEE and m == 0)
        or (specials is Specials.NAN_ONLY and e + m == 1)
        or (specials is Specials.NEGATIVE_ZERO and not signed)
    )


def magnitudes(e, m, bias, specials):
    """The finite values from 0 up, as float64, which is exact; and whether casts can compute with them."""
    kind, n, s = kinds(e, m, specials)
    n, s = n[kind == "finite"], s[kind == "finite"] - bias
    low, high = int(s.min()), int(s.max()) + int(n.max()).bit_length() - 1
    return (np.ldexp(n.astype(np.float64), s), True) if low >= -126 and high <= 126 else (None, False)


def points_between(grid):
    """(x, how far along the gap: below the middle, on it, above; the lower neighbour's code)."""
    low, middle = grid[:-1], (grid[:-1] + grid[1:]) / 2
    x = np.concatenate([grid[1:], np.nextafter(np.float32(middle), np.float32(0)), middle])
    x = np.concatenate([x, np.nextafter(np.float32(middle), np.float32(np.inf))]).astype(np.float64)
    code = np.arange(len(low))
    return x, np.repeat([2, -1, 0, 1], len(low)), np.tile(code, 4)


def rounded_code(place, lower, rounding):
    up = {
        "nearest-even": (place > 0) | ((place == 0) & (lower % 2 == 1)),
        "half-away": place >= 0,
        "toward-zero": place == 2,
        "stochastic": (place >= 0) | (place == -1),  # a fraction just below 1/2 is above a quarter
    }[rounding]
    return lower + np.where(place == 2, 1, up)


def same(got, want):
    got, want = torch.as_tensor(got, dtype=torch.float64), torch.as_tensor(want, dtype=torch.float64)
    is_same = torch.equal(got.nan_to_num(1.25e300), want.nan_to_num(1.25e300))
    return is_same and torch.equal(got.signbit()[~got.isnan()], want.signbit()[~got.isnan()])


def require_exact(fmt, grid, kind):
    """Decoding, encoding and rounding of a format that is served."""
    bits, top = len(kind), fmt.bits - 1
    values = np.full(bits, np.nan)
    values[kind == "finite"], values[kind == "inf"] = grid, np.inf
    codes = np.arange(bits)
    if fmt.signed:
        codes, values = np.concatenate([codes, codes + 2**top]), np.concatenate([values, -values])
    if fmt.specials is Specials.NEGATIVE_ZERO:
        values[2**top] = np.nan
    given = torch.from_numpy(codes.astype(np.uint8))
    assert same(decode(given, fmt), values)
    is_number = torch.from_numpy(~np.isnan(values))
    assert torch.equal(encode(torch.from_numpy(values)[is_number], fmt), given[is_number])
    assert (fmt.max, fmt.smallest_subnormal) == (grid[-1], grid[1])
    x, place, lower = points_between(grid)
    uniform = torch.full((len(x),), QUARTER)
    for dtype, rounding in itertools.product((torch.float32, torch.float64), ROUNDINGS):
        want = grid[rounded_code(place, lower, rounding)]
        assert same(ng.round_to(torch.from_numpy(x).to(dtype), fmt, rounding, uniform), want), (fmt, rounding)
        if fmt.signed and rounding == "nearest-even":
            minus = -want if fmt.has_negative_zero else np.where(want == 0, 0.0, -want)
            assert same(ng.round_to(-torch.from_numpy(x).to(dtype), fmt), minus), fmt
    edge = torch.tensor([grid[-1] * 1.5, torch.inf, torch.nan, -torch.inf, -1.0])
    least = -min(1.0, grid[-1]) if fmt.signed and grid[-1] <= 1 else None
    got = ng.round_to(edge, fmt)
    assert same(got[:2], [grid[-1], np.inf if fmt.has_infinity else np.nan])
    assert got[2].isnan()
    assert same(got[3], -np.inf if fmt.signed and fmt.has_infinity else np.nan)
    assert least is None or got[4] == least
    assert fmt.signed or got[4].isnan()


def require_codes_of_casts(fmt, grid):
    """Codes of `ng.quantize` under the scale 1, by whichever code computes them."""
    x, place, lower = points_between(grid)
    q = ng.quantize(torch.from_numpy(np.concatenate([x, -x])).float(), fmt)
    want = rounded_code(place, lower, "nearest-even")
    minus = np.where((want == 0) & (not fmt.has_negative_zero), 0, want + 2 ** (fmt.bits - 1))
    assert q.scales == 1
    assert torch.equal(q.codes, torch.from_numpy(np.concatenate([want, minus]).astype(np.uint8))), fmt


def assert_whole_numbers(fmt):
    """Codes of a format in two's complement, but for the one without a counterpart."""
    grid, _ = magnitudes(0, fmt.mantissa_bits, fmt.bias, Specials.NONE)
    codes, minus = (torch.arange(len(grid)) * sign % 2**fmt.bits for sign in (1, -1))
    assert same(decode(codes.to(torch.uint8), fmt), grid)
    assert torch.equal(encode(-torch.from_numpy(grid), fmt), minus.to(torch.uint8))


def require_served_or_refused(bias, widest, monkeypatch):
    served = 0
    for make, (name, e, m, _, specials, *signed), more in all_formats(bias):
        is_signed = signed[0] if signed else True
        if is_signed + e + m > widest:
            continue
        kind, _, _ = kinds(e, m, specials)
        may_serve = not contradicts(e, m, specials, is_signed)
        grid, fits = magnitudes(e, m, bias, specials) if may_serve else (None, False)
        if not (may_serve and fits):
            with pytest.raises(UserError, match=f"^format '{name}': "):
                ng.round_to(torch.ones(1), make(name, e, m, bias, specials, *signed, **more))
            continue
        fmt, served = make(name, e, m, bias, specials, *signed, **more), served + 1
        if fmt.twos_complement:
            assert_whole_numbers(fmt)
            continue
        require_exact(fmt, grid, kind)
        for kernels in ("0", "1") if is_signed else ():
            monkeypatch.setenv("NARROWGAUGE_KERNELS", kernels)
            require_codes_of_casts(fmt, grid)
    return served


@pytest.mark.parametrize("bias", [-1, 3])
def test_formats_of_at_most_four_bits_are_exact_or_refused(bias, monkeypatch):
    assert require_served_or_refused(bias, 4, monkeypatch) == 53


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("bias", BIASES)
def test_formats_of_every_width_are_exact_or_refused(bias, monkeypatch):
    served = require_served_or_refused(bias, 8, monkeypatch)
    assert (served > 0) == (-130 < bias < 128)
