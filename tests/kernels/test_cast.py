"""Casts in kernels: what the table of `test_twins` leaves out, against their references, bit for bit."""

import dataclasses

import pytest
import torch

from kernels.common import INF, NAN, assert_same, normal, same_bits
from narrowgauge.formats import random_stream, torch_dtype
from narrowgauge.kernels import emulate, quantize
from narrowgauge.kernels.cast import amaxes_of
from narrowgauge.quantization import DEFAULT_CONTEXT, QuantContext, make_cast, quantize_in_context
from narrowgauge.quantization import cast as cast_named
from narrowgauge.quantization import emulate as emulate_in_torch
from narrowgauge.quantization import quantize as quantize_in_torch
from narrowgauge.recipes import named_device
from narrowgauge.system.devices import imagine
from narrowgauge.system.errors import UserError

BF16, F32 = torch.bfloat16, torch.float32


def inputs(device):
    numbers = normal(40, 72)
    not_finite = numbers.clone()
    not_finite[3, 5], not_finite[20, 40], not_finite[39, 71] = NAN, INF, -INF
    every = {
        "normal": numbers,
        "bf16": numbers.bfloat16(),
        "fp16": numbers.half(),
        "wide": numbers * torch.exp2((20 * normal(40, 72, seed=1)).round()),
        "not finite": not_finite,
        "one": torch.tensor([[-0.3]]),
        "columns of a wider one": numbers[:, 8:56],
        "transposed": numbers.T,
    }
    return {k: x.to(device) for k, x in every.items()}


def assert_same_tensors(x, cast, axis, context=DEFAULT_CONTEXT, dtypes=(BF16,)):
    plain = quantize_in_context(x, cast, axis, context)
    ours, other = quantize(x, cast, axis, context, both=cast.block is None)
    if cast.block is None:  # the same, next to each other along the other axis
        assert torch.equal(other, ours.codes)
        assert (other if axis == 0 else other.T).is_contiguous()
    assert (ours.codes if axis == -1 else ours.codes.T).is_contiguous()
    fields = ("codes", "scales", "scale_codes", "tensor_scale")
    assert_same([getattr(ours, f) for f in fields], [getattr(plain, f) for f in fields])
    assert ours.blocks == plain.blocks
    for dtype in dtypes:
        (ours, factor), (plain, expected) = (
            f(x, cast, axis, dtype, context) for f in (emulate, emulate_in_torch)
        )
        assert same_bits(factor, expected)
        if expected is None or expected.isfinite():
            assert same_bits(ours, plain)
        else:  # all of it is NaN, whatever the codes under the scale are
            assert (ours.float() * factor).isnan().all()


@pytest.mark.tier("thorough", keep=("fp8-row-0",))
@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("name", ["e4m3", "fp8-row", "fp8-1x128", "fp8-128x128", "mxfp4", "nvfp4"])
def test_equals_the_reference_wherever_numbers_lie(name, axis, device):
    """One cast for each kind of scale. The dtype of an operand is that of its last store."""
    every = inputs(device)
    for kind in ("fp16", "wide", "not finite", "one", "columns of a wider one", "transposed"):
        assert_same_tensors(every[kind], cast_named(name), axis)
    assert_same_tensors(every["normal"], cast_named(name), axis, dtypes=(F32,))


@pytest.mark.tier("thorough", keep=("e5m2",))
@pytest.mark.parametrize("name", ["e5m2", "nvfp4", "fp8-128x128"])
def test_random_rounding_takes_the_same_bits(name, device):
    """The stream has been drawn from before, up to offsets beyond 32 bits."""
    x, beyond_32_bits = inputs(device)["wide"], torch.tensor(2**32 - 100, device=device)
    for bits, offset in ((24, 7 * 2**30), (24, beyond_32_bits), (8, beyond_32_bits)):
        cast = make_cast({"cast": name, "rounding": "stochastic", "random_bits": bits})
        bits_of = dataclasses.replace(random_stream(1, 2, 3, device), offset=offset)
        for axis in (-1, 0):
            assert_same_tensors(x, cast, axis, QuantContext(bits_of))


def test_of_many_tensors_each_is_read_once(device):
    x = inputs(device)["normal"]
    bad = x.clone()
    bad[1, 2], bad[3, 4] = INF, NAN
    tensors = [x, bad, x[:0], x[0] * 9, x.T, -x.bfloat16(), torch.zeros(3, 3, device=device)]
    expected = torch.stack([t.float().abs().amax() if t.numel() else x.new_zeros(()) for t in tensors])
    assert same_bits(amaxes_of(tensors), expected)


@pytest.mark.parametrize("shape", [(8, 17_000_000), (17_000_000, 8), (10**8,)])
def test_a_long_tensor_is_read_by_a_grid_that_a_gpu_takes(shape):
    """Such is a gradient that travels in FP8, a row for each process."""
    told = []
    with imagine(named_device("h200"), told.append):
        amaxes_of([torch.empty(shape, device="meta")])
    assert len(told) == 1


@pytest.mark.parametrize("name", ["e4m3", "fp8-row", "fp8-1x128", "mxfp8", "nvfp4"])
def test_scales_are_fp32_whatever_the_default_dtype_is(name, device):
    x, cast = inputs(device)["bf16"], cast_named(name)
    expected, _ = quantize(x, cast)
    torch.set_default_dtype(BF16)
    try:
        found, _ = quantize(x, cast)
    finally:
        torch.set_default_dtype(F32)
    assert_same([found.scales, found.codes], [expected.scales, expected.codes])


@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize(("name", "size"), [("nvfp4", 16), ("mxfp4", 16), ("mxfp4", 32)])
def test_a_transform_of_small_integers_is_exact(name, size, axis, device):
    """Sums of integers have no order, so that everything after them must be the same."""
    g = torch.Generator().manual_seed(1)
    x = torch.randint(-8, 9, (70, 100), generator=g).bfloat16().to(device)
    signs = (1 - 2 * torch.randint(0, 2, (size,), generator=g)).to(device)
    if size == 16:  # sqrt(16) is exact, also in bf16
        assert_same_tensors(x, make_cast({"cast": name, "hadamard": 16}), axis)
    cast = make_cast({"cast": name, "hadamard": size, "signs": "random"})
    context = QuantContext(signs=signs)
    ours, plain = quantize(x, cast, axis, context)[0], quantize_in_context(x, cast, axis, context)
    ours, plain = ours.dequantize(), plain.dequantize()
    assert ours.shape == plain.shape
    assert (ours != plain).float().mean() < 0.01
    for f in (quantize, quantize_in_torch):
        with pytest.raises(UserError, match="takes random signs"):
            f(x, cast, axis)


@pytest.mark.parametrize(("scale", "name"), [(0.37, "e4m3"), (3.1e-3, "e5m2")])
def test_every_bf16_number_has_the_code_of_a_saturating_conversion(scale, name, device):
    """A GPU's own instruction may make these codes (`rounding.to_fp8`): nearest even, saturating."""
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(BF16)
    x = torch.where(bits.isfinite(), bits, 0.0).reshape(256, 256).to(device)
    cast, scale = cast_named(name), torch.tensor(scale, device=device)
    codes = quantize(x, cast, -1, QuantContext(scale=scale))[0].codes
    expected = (x.float() * scale).clamp(-cast.element.max, cast.element.max)
    assert torch.equal(codes, expected.to(torch_dtype(cast.element)).view(torch.uint8))


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-2d"])
def test_a_known_amax_is_taken_if_it_is_finite(name, device):
    """A tensor that is not finite is read for the largest of its finite blocks."""
    every, cast = inputs(device), cast_named(name)
    x = every["not finite"]
    assert_same_tensors(x, cast, -1, QuantContext(amax=x.abs().amax()))
    x = every["bf16"]
    twice = QuantContext(amax=x.float().abs().max() * 2)  # shows that it is taken
    assert quantize(x, cast, -1, twice)[0].tensor_scale == 2 * quantize_in_torch(x, name).tensor_scale


def test_what_has_no_kernel_goes_to_the_reference(device):
    x = inputs(device)["normal"]
    odd = {"element": "e2m1", "block": [3, 48], "scale": "e5m3"}  # no tile is made of such blocks
    for free in ({"cast": "fp4-row", "outliers": 0.99, "compensate": True}, "bf16", odd):
        ours, plain = (f(x, make_cast(free), -1, BF16) for f in (emulate, emulate_in_torch))
        assert same_bits(ours[0], plain[0])
    ours, other = quantize(x[None], cast_named("mxfp4"))
    assert_same([ours.codes, other], [quantize_in_torch(x[None], "mxfp4").codes, None])
