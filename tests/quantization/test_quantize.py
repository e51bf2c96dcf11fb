"""Codes and scales: against the oracle by hand, and the promises a user relies on."""

import math
import shutil

import ml_dtypes
import numpy as np
import pytest
import torch

import narrowgauge as ng
from narrowgauge.errors import UserError
from narrowgauge.formats import decode, unpack
from narrowgauge.quantization import cast as cast_named
from narrowgauge.quantization import cast_names, emulate, make_cast
from quantization.by_hand import SMALL, assert_as_by_hand, inputs
from support.fault_table import case

SCALED = [n for n in cast_names() if cast_named(n).is_scaled]
MX = [n for n in SCALED if cast_named(n).scales.format == "e8m0"]


def can_have(name, kind):
    """Whether a cast takes an input: a two-dimensional block needs a matrix."""
    block = cast_named(name).block
    return kind != "vector" or block is None or block[0] == 1


VARIANTS = {
    "e8m0": [{"scale_rule": rule} for rule in ("floor", "ceil", "even", "rceil")],
    "fp32": [{"power_of_two": False}, {"power_of_two": True}],
    "e4m3": [{"headroom": 1.0}, {"headroom": 16 / 17}],
}
INPUTS_OF = [(n, k) for n in SCALED for k in inputs() if can_have(n, k)]
# Along axis 0 the oracle looks at one input of each cast, whose last blocks are not full; a test without the
# oracle shows that all others equal the transpose's.
ALONG = [(n, k, axis) for axis in (-1, 0) for n, k in INPUTS_OF if axis == -1 or k == "ragged"]


def assert_variants_as_by_hand(x, name, axis):
    for variant in VARIANTS[cast_named(name).scales.format]:
        assert_as_by_hand(x, make_cast({"cast": name} | variant), axis)


@pytest.mark.tier("thorough", keep=("wide",))
@case("E2", tier="quick")
@pytest.mark.parametrize(("name", "kind", "axis"), ALONG)
def test_equals_the_oracle_bit_for_bit(name, kind, axis):
    assert_variants_as_by_hand(inputs(SMALL)[kind], name, axis)


@pytest.mark.tier("nightly")  # the oracle takes its time for each number, and these are five times as many
@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize(("name", "kind"), INPUTS_OF)
def test_many_numbers_equal_the_oracle_bit_for_bit(name, kind, axis):
    assert_variants_as_by_hand(inputs()[kind], name, axis)


@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("name", SCALED)
def test_dequantize_is_what_the_attributes_say(name, axis):
    x = torch.randn(64, 96)
    q = ng.quantize(x, name, axis=axis)
    scales = q.scales
    for dim in range(scales.ndim):
        scales = scales.repeat_interleave(x.shape[dim] // scales.shape[dim], dim)
    expected = decode(q.codes, q.cast.element) * scales * q.tensor_scale
    assert torch.equal(q.dequantize(), expected)
    error = (q.dequantize() - x).norm() / x.norm()
    assert error < {"e2m1": 0.14, "e5m2": 0.08, "e5m2fnuz": 0.08, "e3m2": 0.08}.get(q.cast.element.name, 0.04)


@pytest.mark.parametrize("name", SCALED)
def test_quantizing_twice_changes_nothing(name):
    once = ng.quantize(torch.randn(32, 64), name).dequantize()
    twice = ng.quantize(once, name).dequantize()
    if name in ("nvfp4", "nvfp4-2d"):  # the block scale is rounded, so its largest element may move a step
        assert (twice - once).norm() < 0.1 * once.norm()
    elif cast_named(name).scales.format == "fp32":  # the scale itself is found again but for its last bits
        torch.testing.assert_close(twice, once, rtol=2.0**-20, atol=0)
    else:
        assert torch.equal(once, twice)


@case("E2", tier="quick")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", SCALED)
def test_non_finite_input_never_comes_out_finite(name, bad):
    x = torch.randn(32, 64)
    x[5, 40] = bad
    q = ng.quantize(x, name)
    poisoned = q.dequantize().isnan()
    rows, columns = q.cast.block or (32, 64)
    columns = columns or 64
    expected = torch.zeros(32, 64, dtype=torch.bool)
    r, c = 5 // rows * rows, 40 // columns * columns
    expected[r : r + rows, c : c + columns] = True
    assert torch.equal(poisoned, expected)
    if q.scale_codes is not None:
        assert set(q.scale_codes[q.scales.isnan()].tolist()) == {
            0xFF if q.cast.scales.format == "e8m0" else 0x7F
        }


@pytest.mark.parametrize("name", SCALED)
def test_scale_codes_decode_to_the_scales(name):
    q = ng.quantize(torch.randn(32, 64) * 100, name)
    if q.scale_codes is None:
        assert q.cast.scales.format == "fp32"
        return
    dtype = ml_dtypes.float8_e8m0fnu if q.cast.scales.format == "e8m0" else ml_dtypes.float8_e4m3fn
    np.testing.assert_array_equal(q.scale_codes.numpy().view(dtype).astype(np.float32), q.scales.numpy())


@pytest.mark.parametrize("name", SCALED)
def test_packed_bytes_unpack_to_the_codes(name):
    q = ng.quantize(torch.randn(32, 64), name)
    packed = q.packed()
    assert packed.numel() == 32 * 64 * q.cast.element.bits // 8
    assert torch.equal(unpack(packed, q.cast.element, 64), q.codes)


@pytest.mark.parametrize("kind", ["normal", "bf16", "ragged", "zeros", "wide"])
@pytest.mark.parametrize("name", SCALED)
def test_the_emulated_operand_is_the_stored_numbers(name, kind):
    x = inputs()[kind]
    q = ng.quantize(x, name)
    operand, scale = emulate(x, cast_named(name), -1, torch.bfloat16)
    # bf16 holds every product of an element and a block's scale, except under fp32 scales other than 2^n
    is_inexact = q.cast.scales.format == "fp32" and q.cast.block is not None
    assert operand.dtype == (torch.float32 if is_inexact else torch.bfloat16)
    assert torch.equal(operand.float() * (1.0 if scale is None else scale), q.dequantize())


def test_two_dimensional_blocks_are_the_same_along_both_axes():
    w = torch.randn(64, 96)
    a, b = ng.quantize(w, "nvfp4-2d", axis=-1), ng.quantize(w, "nvfp4-2d", axis=0)
    assert torch.equal(a.codes, b.codes)
    assert torch.equal(a.scales, b.scales)


@pytest.mark.parametrize("name", SCALED)
def test_along_axis_0_everything_is_that_of_the_transpose(name):
    for kind, x in inputs().items():
        for variant in VARIANTS[cast_named(name).scales.format] if can_have(name, kind) else ():
            varied = make_cast({"cast": name} | variant)
            q, of_the_transpose = ng.quantize(x, varied, axis=0), ng.quantize(x.movedim(0, -1), varied)
            assert torch.equal(q.codes, of_the_transpose.codes.movedim(0, -1)), (kind, variant)
            assert torch.equal(q.scales, of_the_transpose.scales.movedim(0, -1)), (kind, variant)
            assert torch.equal(q.tensor_scale, of_the_transpose.tensor_scale), (kind, variant)


def test_saturation_by_scale_rule_is_as_published():
    """Share of blocks of N(0, 1) with a saturated element: floor 16.9 % and 29.6 %, rceil none."""
    x = torch.randn(8192, 32, generator=torch.Generator().manual_seed(0))
    for name, rule, share in (("mxfp8", "floor", 0.169), ("mxfp4", "floor", 0.296), ("mxfp4", "even", 0.127)):
        q = ng.quantize(x, name, scale_rule=rule)
        saturated = (x.abs().amax(1) / q.scales[:, 0] > q.cast.element.max).float().mean().item()
        assert abs(saturated - share) < 4 * math.sqrt(share * (1 - share) / 8192)
    for name in MX:
        q = ng.quantize(x, name)
        assert (x.abs().amax(1) / q.scales[:, 0] <= q.cast.element.max).all()


def test_headroom_ends_the_clipping_of_nvfp4():
    x = torch.randn(4096, 64, generator=torch.Generator().manual_seed(0))
    for headroom, clips in ((1.0, True), (16 / 17, False)):
        c = make_cast({"cast": "nvfp4", "headroom": headroom})
        q = ng.quantize(x, c)
        ratio = x.unflatten(1, (-1, 16)).abs().amax(-1) / (q.scales * q.tensor_scale)
        assert (ratio.max() > 6 * (1 + 1e-6)).item() == clips


def test_stochastic_rounding_is_unbiased_through_quantize():
    x = torch.randn(1, 32, generator=torch.Generator().manual_seed(3)).expand(20_000, 32)
    g = torch.Generator().manual_seed(1)
    mean = ng.quantize(x, "mxfp4", rounding="stochastic", generator=g).dequantize().mean(0)
    step = ng.quantize(x[:1], "mxfp4").scales.item() * 2
    assert (mean - x[0]).abs().max() < 5 * step / math.sqrt(20_000)


def test_hadamard_keeps_products_and_spreads_outliers():
    from narrowgauge.quantization.stages.hadamard import hadamard

    a, b = torch.randn(8, 64).double(), torch.randn(5, 64).double()
    product = hadamard(a, 16, -1) @ hadamard(b, 16, -1).T
    torch.testing.assert_close(product, a @ b.T, rtol=1e-12, atol=1e-12)
    spike = torch.zeros(1, 16)
    spike[0, 3] = 16.0
    assert torch.equal(hadamard(spike, 16, -1).abs(), torch.full((1, 16), 4.0))
    assert torch.equal(hadamard(a.T, 16, 0), hadamard(a, 16, -1).T)


@pytest.mark.tier("nightly", keep=2)
@pytest.mark.tier("thorough")  # compiles for seconds; nn/test_compile.py keeps some
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, while it compiles
@pytest.mark.parametrize("name", ["e5m2", "fp8-row", "mxfp8", "mxfp4", "nvfp4"])
def test_compiled_emulation_is_bit_identical(name):
    def operand(x, name, axis):
        return emulate(x, cast_named(name), axis, torch.bfloat16)

    def stored(x, name, axis):
        q = ng.quantize(x, name, axis)
        return q.codes, q.scales

    torch.compiler.reset()  # each cast is compiled separately
    x = torch.randn(64, 96).bfloat16()
    for function in (operand, stored):
        for axis in (-1, 0):
            got = torch.compile(function, fullgraph=True)(x, name, axis)
            for g, w in zip(got, function(x, name, axis), strict=True):
                assert g is w or torch.equal(g, w)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and this machine has none")
@pytest.mark.parametrize("name", SCALED)
def test_a_gpu_gives_the_same_codes_and_scales(name):
    for x in inputs().values():
        if x.ndim == 2:
            cpu, gpu = ng.quantize(x, name), ng.quantize(x.cuda(), name)
            assert torch.equal(cpu.codes, gpu.codes.cpu())
            assert torch.equal(cpu.scales, gpu.scales.cpu())


def test_mistakes_are_answered_in_a_sentence():
    with pytest.raises(UserError, match=r"unknown cast 'mxpf4'; the nearest is 'mxfp4'"):
        ng.quantize(torch.ones(2), "mxpf4")
    with pytest.raises(UserError, match=r"unknown scale rule 'flor'; the nearest is 'floor'"):
        ng.quantize(torch.ones(2), "mxfp4", scale_rule="flor")
    with pytest.raises(UserError, match="belongs to E8M0 scales only"):
        ng.quantize(torch.ones(2), "e4m3", scale_rule="floor")
    with pytest.raises(UserError, match="needs a matrix"):
        ng.quantize(torch.ones(16), "nvfp4-2d")
    with pytest.raises(UserError, match="axis 2 of a tensor of shape"):
        ng.quantize(torch.ones(2, 32), "mxfp4", axis=2)
    with pytest.raises(UserError, match="unknown cast key 'roundin'; the nearest is 'rounding'"):
        make_cast({"cast": "nvfp4", "roundin": "stochastic"})


def test_a_quantized_tensor_shows_its_shape_scales_and_cast_and_no_codes():
    assert repr(ng.quantize(torch.ones(64, 32), "nvfp4")) == (
        "QTensor(shape=(64, 32), dtype=torch.uint8, device=cpu, scales of shape (64, 2), "
        "tensor_scale=0.000372024, cast=Cast('nvfp4', element=e2m1, scale='e4m3', tensor_scale='tensor', "
        "block=(1, 16)))"
    )
    rows = repr(ng.quantize(torch.ones(64, 32), {"cast": "nvfp4", "tensor_scale": "row"}))
    assert "tensor_scale=a tensor of shape (64, 1)" in rows
    assert "tensor_scale=a tensor of shape ()" in repr(
        ng.quantize(torch.ones(64, 32, device="meta"), "mxfp4")
    )
