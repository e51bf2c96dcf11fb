"""Casts in kernels give the codes, scales and numbers of their references, bit for bit."""

import dataclasses

import pytest
import torch

from narrowgauge.devices import imagine
from narrowgauge.errors import UserError
from narrowgauge.formats import random_stream, torch_dtype
from narrowgauge.kernels import emulate, quantize
from narrowgauge.kernels.cast import amaxes_of, codes_under
from narrowgauge.quantization import DEFAULT_CONTEXT, QuantContext, cast_names, make_cast, quantize_in_context
from narrowgauge.quantization import cast as cast_named
from narrowgauge.quantization import emulate as emulate_in_torch
from narrowgauge.quantization import quantize as quantize_in_torch
from narrowgauge.quantization.scales import fp32_scale
from narrowgauge.recipes import named_device

SCALED = [n for n in cast_names() if cast_named(n).is_scaled]
ROUNDINGS = ("nearest-even", "stochastic", "half-away", "toward-zero")


def inputs(device):
    g = torch.Generator().manual_seed(0)
    normal = torch.randn(40, 72, generator=g)
    not_finite = normal.clone()
    not_finite[3, 5], not_finite[20, 40], not_finite[39, 71] = torch.nan, torch.inf, -torch.inf
    every = {
        "normal": normal,
        "bf16": normal.bfloat16(),
        "fp16": normal.half(),
        "wide": normal * torch.exp2(torch.randint(-60, 60, (40, 72), generator=g)),
        "subnormal": normal * 2.0**-140,
        "huge": normal.sign() * 3.3e38,
        "zeros": torch.zeros(33, 20),
        "negative zeros": torch.full((16, 32), -0.0),
        "not finite": not_finite,
        "one": torch.tensor([[-0.3]]),
        "ties": torch.arange(-512, 512).reshape(16, 64) / 32,
        "columns of a wider one": normal[:, 8:56],
        "transposed": normal.T,
    }
    return {k: x.to(device) for k, x in every.items()}


def same(a, b):
    """Equal bit for bit; any NaN is any other, of whatever sign."""
    if a is None or b is None:
        return a is b
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    is_same = (a == b) & (a.signbit() == b.signbit()) | a.isnan() & b.isnan()
    return bool(is_same.all())


def variants(name):
    """A cast as it is, and with everything else that its scale allows."""
    cast = cast_named(name)
    if cast.scales.format == "e8m0":
        return [cast.having(scale_rule=rule) for rule in ("rceil", "floor", "ceil", "even")]
    if cast.scales.format == "e4m3":
        return [cast, cast.having(headroom=16 / 17)]
    return [cast, cast.having(power_of_two=True)]


def assert_same_tensors(x, cast, axis, context=DEFAULT_CONTEXT, dtypes=(torch.bfloat16, torch.float32)):
    plain = quantize_in_context(x, cast, axis, context)
    ours, other = quantize(x, cast, axis, context, both=cast.block is None)
    if cast.block is None:  # the same, next to each other along the other axis
        assert torch.equal(other, ours.codes)
        assert (other if axis == 0 else other.T).is_contiguous()
    assert (ours.codes if axis == -1 else ours.codes.T).is_contiguous()
    for field in ("codes", "scales", "scale_codes", "tensor_scale"):
        assert same(getattr(ours, field), getattr(plain, field)), field
    assert ours.blocks == plain.blocks
    for dtype in dtypes:
        ours = emulate(x, cast, axis, dtype, context)
        plain = emulate_in_torch(x, cast, axis, dtype, context)
        assert same(ours[1], plain[1])
        if plain[1] is None or plain[1].isfinite():
            assert same(ours[0], plain[0])
        else:  # all of it is NaN, whatever the codes under the scale are
            assert (ours[0].float() * ours[1]).isnan().all()


# Along axis 0 a kernel reads other addresses and computes the same: what is strange about an input's numbers,
# and not about where they lie, is looked at along axis -1.
WHERE_NUMBERS_LIE = ("normal", "bf16", "zeros", "not finite", "one", "columns of a wider one", "transposed")


def assert_kinds(name, axis, device, kinds, kinds_of_variants, kinds_of_fp32):
    first, *others = variants(name)
    for kind, x in inputs(device).items():
        dtypes = (torch.bfloat16, torch.float32) if kind in kinds_of_fp32 else (torch.bfloat16,)
        if kind in kinds:
            assert_same_tensors(x, first, axis, dtypes=dtypes)
        for cast in others if kind in kinds_of_variants else ():
            assert_same_tensors(x, cast, axis, dtypes=dtypes)


@pytest.mark.tier("thorough", keep=("fp8-row-0",))
@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("name", SCALED)
def test_equals_the_reference_bit_for_bit(name, axis, device):
    """The dtype of an operand is that of its last store: one input shows it."""
    kinds = WHERE_NUMBERS_LIE if axis == 0 else inputs(device)
    assert_kinds(name, axis, device, kinds, ("wide", "subnormal", "huge") if axis == -1 else (), ("normal",))


FREE = {
    "fp4 ue5m3": {"element": "e2m1", "block": 16, "scale": "e5m3"},
    "int4 bf16 of 32x32": {"element": "int4", "block": [32, 32], "scale": "bf16"},
    "e1m2 e4m3 alone": {"element": "e1m2", "block": 64, "scale": "e4m3"},
    "e4m3 ue5m3 a row": {"element": "e4m3", "block": "row", "scale": "e5m3"},
    "mxfp8 of 128x128": {"element": "e4m3", "block": [128, 128], "scale": "e8m0"},
    "int4 under a tensor scale": {"element": "int4", "block": 16, "scale": "e4m3", "tensor_scale": "tensor"},
}


@pytest.mark.tier("thorough", keep=4)
@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("name", FREE)
def test_free_keys_equal_the_reference_bit_for_bit(name, axis, device):
    every = inputs(device)
    kinds = ("normal", "bf16", "wide", "subnormal", "zeros", "not finite") if axis == -1 else ("bf16",)
    for kind in kinds:
        dtypes = (torch.bfloat16, torch.float32) if kind == "normal" else (torch.bfloat16,)
        assert_same_tensors(every[kind], make_cast(FREE[name]), axis, dtypes=dtypes)


@pytest.mark.tier("thorough", keep=("e5m2-nearest-even", "e5m2-half-away"))
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize(
    "name", ["e5m2", "e4m3fnuz", "mxint8", "mxfp6-e2m3", "nvfp4", "fp4-row", "fp8-128x128"]
)
def test_every_rounding_takes_the_same_bits(name, rounding, device):
    x = inputs(device)["wide"]
    beyond_32_bits = torch.tensor(2**32 - 100, device=device)
    draws = [(24, 0), (24, 7 * 2**30), (24, beyond_32_bits), (8, beyond_32_bits)]
    for bits, offset in draws if rounding == "stochastic" else draws[:1]:
        cast = make_cast({"cast": name, "rounding": rounding, "random_bits": bits})
        bits_of = dataclasses.replace(random_stream(1, 2, 3, device), offset=offset)
        for axis in (-1, 0):
            assert_same_tensors(x, cast, axis, QuantContext(bits_of), (torch.bfloat16,))


@pytest.mark.tier("thorough")  # axis 0 has other addresses alone
@pytest.mark.parametrize("axis", [-1, 0])
def test_a_delayed_scale_is_taken_and_saturates(axis, device):
    cast = make_cast({"cast": "e4m3", "history": 4})
    for kind, x in inputs(device).items():
        for scale in (0.37, 2.0**20, 2.0**-120) if kind in ("normal", "huge", "not finite") else (0.37,):
            context = QuantContext(scale=torch.tensor(scale, device=device))
            assert_same_tensors(x, cast, axis, context, (torch.bfloat16,))


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("before", [0.0, 1e30])
def test_under_a_delayed_scale_a_cast_tells_the_history_what_it_saw(before, device, monkeypatch):
    """Its own largest magnitude, if that is finite, and larger than what was seen before."""
    cast = make_cast({"cast": "e4m3", "history": 4})

    def seen(x, function):
        """After the cast of a kernel, or of plain operations."""
        amax = torch.tensor(before, device=device)
        function(x, QuantContext(scale=torch.tensor(0.37, device=device), seen=amax))
        return amax

    for kind, x in inputs(device).items():
        amax = x.float().abs().max()
        expected = torch.tensor(max(before, amax.item() if amax.isfinite() else 0.0), device=device)
        assert torch.equal(seen(x, lambda x, c: quantize(x, cast, -1, c, both=True)), expected), kind
        assert torch.equal(seen(x, lambda x, c: emulate(x, cast, 0, torch.bfloat16, c)), expected), kind
        with monkeypatch.context() as patch:
            patch.setenv("NARROWGAUGE_KERNELS", "0")
            assert torch.equal(seen(x, lambda x, c: quantize(x, cast, -1, c)), expected), kind


def test_of_many_tensors_each_is_read_once(device):
    x = inputs(device)["normal"]
    bad = x.clone()
    bad[1, 2], bad[3, 4] = torch.inf, torch.nan
    tensors = [x, bad, x[:0], x[0] * 9, x.T, -x.bfloat16(), torch.zeros(3, 3, device=device)]
    expected = torch.stack([t.float().abs().amax() if t.numel() else x.new_zeros(()) for t in tensors])
    assert torch.equal(amaxes_of(tensors).nan_to_num(-1), expected.nan_to_num(-1))


@pytest.mark.parametrize("shape", [(8, 17_000_000), (17_000_000, 8), (10**8,)])
def test_a_long_tensor_is_read_by_a_grid_that_a_gpu_takes(shape):
    """Such is a gradient that travels in FP8, a row for each process."""
    told = []
    with imagine(named_device("h200"), told.append):
        amaxes_of([torch.empty(shape, device="meta")])
    assert len(told) == 1


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_under_a_scale_that_is_known_codes_are_those_of_the_reference(name, device):
    """A shard's, whose largest magnitude may be another process's; NaN for all where any is not finite."""
    cast = cast_named(name)
    for kind, x in inputs(device).items():
        if kind == "not finite":
            continue
        x = x.float()
        for amax in (x.abs().max(), 3 * x.abs().max()):
            encode, decode = fp32_scale(amax, cast.element)
            expected = quantize_in_context(x, cast, -1, QuantContext(scale=encode))
            assert torch.equal(codes_under(x, cast, encode, decode), expected.codes), kind
    codes = codes_under(inputs(device)["normal"].float(), cast, encode, torch.full_like(decode, torch.nan))
    assert not codes.any(), "zeros times a scale of NaN are NaN"


@pytest.mark.parametrize("name", ["e4m3", "fp8-row", "fp8-1x128", "mxfp8", "nvfp4"])
def test_scales_are_fp32_whatever_the_default_dtype_is(name, device):
    x, cast = inputs(device)["bf16"], cast_named(name)
    expected, _ = quantize(x, cast)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found, _ = quantize(x, cast)
    finally:
        torch.set_default_dtype(torch.float32)
    assert same(found.scales, expected.scales)
    assert same(found.codes, expected.codes)


@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("size", [16, 32])
def test_a_transform_of_small_integers_is_exact(name, size, axis, device):
    """Sums of integers have no order, so that everything after them must be the same."""
    g = torch.Generator().manual_seed(1)
    x = torch.randint(-8, 9, (70, 100), generator=g).bfloat16().to(device)
    signs = (1 - 2 * torch.randint(0, 2, (size,), generator=g)).to(device)
    if size == 16:  # sqrt(16) is exact, also in bf16
        assert_same_tensors(x, make_cast({"cast": name, "hadamard": 16}), axis)
    cast = make_cast({"cast": name, "hadamard": size, "signs": "random"})
    context = QuantContext(signs=signs)
    ours, _ = quantize(x, cast, axis, context)
    ours, plain = ours.dequantize(), quantize_in_context(x, cast, axis, context).dequantize()
    assert ours.shape == plain.shape
    assert (ours != plain).float().mean() < 0.01


@pytest.mark.tier("thorough", keep=(0.37, 3.1e-3))
@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
@pytest.mark.parametrize("scale", [1.0, 0.37, 3.1e-3, 2.0**-7])
def test_every_bf16_number_has_the_code_of_a_saturating_conversion(name, scale, device):
    """A GPU's own instruction may make these codes (`rounding.to_fp8`): nearest even, saturating."""
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = torch.where(bits.isfinite(), bits, 0.0).reshape(256, 256).to(device)
    cast, scale = cast_named(name), torch.tensor(scale, device=device)
    codes = quantize(x, cast, -1, QuantContext(scale=scale))[0].codes
    expected = (x.float() * scale).clamp(-cast.element.max, cast.element.max)
    assert torch.equal(codes, expected.to(torch_dtype(cast.element)).view(torch.uint8))


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-2d"])
def test_a_known_amax_is_taken_if_it_is_finite(name, device):
    """A tensor that is not finite is read for the largest of its finite blocks."""
    for kind in ("bf16", "not finite", "zeros"):
        x = inputs(device)[kind]
        context = QuantContext(amax=x.float().abs().amax())
        for axis in (-1, 0):
            assert_same_tensors(x, cast_named(name), axis, context, dtypes=(torch.bfloat16,))
    x = inputs(device)["bf16"]
    twice = QuantContext(amax=x.float().abs().max() * 2)  # shows that it is taken
    assert (
        quantize(x, cast_named(name), -1, twice)[0].tensor_scale
        == 2 * quantize_in_torch(x, name).tensor_scale
    )


def test_random_signs_have_to_be_given(device):
    cast = make_cast({"cast": "mxfp4", "hadamard": 32, "signs": "random"})
    for f in (quantize, quantize_in_torch):
        with pytest.raises(UserError, match="takes random signs"):
            f(inputs(device)["bf16"], cast, -1)


def test_what_has_no_kernel_goes_to_the_reference(device):
    x = inputs(device)["normal"]
    odd = make_cast({"element": "e2m1", "block": [3, 48], "scale": "e5m3"})  # no tile is made of such blocks
    for cast in (
        make_cast({"cast": "fp4-row", "outliers": 0.99, "compensate": True}),
        cast_named("bf16"),
        odd,
    ):
        ours, plain = (f(x, cast, -1, torch.bfloat16) for f in (emulate, emulate_in_torch))
        assert same(ours[0], plain[0])
    ours, other = quantize(x[None], cast_named("mxfp4"))
    assert same(ours.codes, quantize_in_torch(x[None], "mxfp4").codes)
    assert other is None
