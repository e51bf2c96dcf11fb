"""The promises of quantized tensors that a user relies on, and of casts."""

import copy
import itertools
import math
import pickle
import shutil
import sys

import ml_dtypes
import numpy as np
import pytest
import torch

import narrowgauge as ng
from narrowgauge.formats import decode, format, random_stream, unpack
from narrowgauge.quantization import (
    Cast,
    QuantContext,
    blocks,
    cast,
    cast_names,
    emulate,
    kept_count,
    make_cast,
    quantize_in_context,
)
from narrowgauge.quantization.scales import FLOAT_MAX, e8m0_code
from narrowgauge.quantization.transforms import hadamard
from narrowgauge.recipes import parse_recipe, recipe
from quantization.by_hand import inputs
from support.fault_table import case

SCALED = [name for name in cast_names() if cast(name).is_scaled]
E5M3 = {"element": "e2m1", "block": 16, "scale": "e5m3"}
FOUR_OVER_SIX = {"cast": "nvfp4", "candidates": [6, 4], "choose": "mae"}
BY_ROW = {"cast": "nvfp4", "tensor_scale": "row"}
KEPT = {"cast": "nvfp4", "keep_channels": 0.1, "keep_cast": "mxfp8"}


@pytest.mark.parametrize("name", SCALED)
def test_codes_scales_and_bytes_are_what_they_are_said_to_be(name):
    for axis in (-1, 0):
        q = ng.quantize(torch.randn(64, 96) * 100, name, axis=axis)
        scales = q.scales
        for dim in range(scales.ndim):
            scales = scales.repeat_interleave(q.codes.shape[dim] // scales.shape[dim], dim)
        assert torch.equal(q.dequantize(), decode(q.codes, q.cast.element) * scales * q.tensor_scale)
        packed = q.packed()
        assert packed.numel() == 64 * 96 * q.cast.element.bits // 8
        assert torch.equal(unpack(packed, q.cast.element, 96), q.codes)
        if q.scale_codes is None:
            assert q.cast.scale == "fp32"
            continue
        dtype = {"e8m0": ml_dtypes.float8_e8m0fnu, "e4m3": ml_dtypes.float8_e4m3fn}[q.cast.scale]
        found = q.scale_codes.numpy().view(dtype).astype(np.float32)
        np.testing.assert_array_equal(found, q.scales.numpy())


@case("E2", tier="quick")
@pytest.mark.parametrize("name", SCALED)
def test_non_finite_input_never_comes_out_finite(name):
    for bad in (math.nan, math.inf, -math.inf):
        x = torch.randn(32, 64)
        x[5, 40] = bad
        q = ng.quantize(x, name)
        rows, columns = q.cast.block or (32, 64)
        columns = columns or 64
        expected = torch.zeros(32, 64, dtype=torch.bool)
        r, c = 5 // rows * rows, 40 // columns * columns
        expected[r : r + rows, c : c + columns] = True
        assert torch.equal(q.dequantize().isnan(), expected)
        if q.scale_codes is not None:
            nan = 0xFF if q.cast.scale == "e8m0" else 0x7F
            assert set(q.scale_codes[q.scales.isnan()].tolist()) == {nan}


def test_what_is_not_finite_breaks_its_own_row_or_channel_alone():
    x = torch.randn(4, 32)
    whole = ng.quantize(x, BY_ROW)
    assert whole.tensor_scale.shape == (4, 1)
    x[1, 3] = math.nan
    q = ng.quantize(x, BY_ROW)
    assert q.dequantize().isnan().sum() == 16
    assert torch.equal(q.codes[[0, 2, 3]], whole.codes[[0, 2, 3]])
    assert ng.quantize(x, {"cast": "nvfp4", "center": "tokens"}).dequantize().isnan().sum() == 16
    given = torch.zeros(32, dtype=torch.bool)
    given[[3, 17]] = True
    seen = quantize_in_context(x, make_cast(KEPT), -1, QuantContext(channels=given)).dequantize()
    assert seen.isnan().nonzero().tolist() == [[1, 3], [1, 17]], "the kept channels have a block of 32"
    q = ng.quantize(torch.full((1, 16), torch.nan), E5M3)
    assert q.scale_codes.tolist() == [[0xFC]]
    assert q.dequantize().isnan().all()


def test_scales_at_the_ends_of_their_ranges():
    """Values by hand: what rounds to a scale of zero, subnormal scales, an inverse cut to the largest."""
    q = ng.quantize(torch.tensor([[2.0**-20] * 16, [-3.0] * 16]).view(1, 32), E5M3, rounding="stochastic")
    assert (q.scales.tolist(), q.codes.tolist()) == ([[1.0, 0.5]], [[0] * 16 + [15] * 16])
    x = torch.full((1, 16), 2.0**-18)  # its scale would be 2^-18 / 6, less than half of e5m3's smallest
    q = ng.quantize(x, E5M3 | {"zero_scale": "smallest"})
    assert (q.scales.item(), q.dequantize().unique().item()) == (2.0**-17, 2.0**-18)
    assert not ng.quantize(x, E5M3 | {"zero_scale": "zero"}).dequantize().any()
    x = torch.full((1, 16), 2.0**-126)
    assert 448 * 6 / x[0, 0].item() > FLOAT_MAX
    assert ng.quantize(x, "nvfp4").tensor_scale.item() == (1 / torch.tensor(FLOAT_MAX)).item()
    amax = torch.tensor([6 * 2.0**-127, 6 * 2.0**-127 * (1 + 2.0**-20), 12 * 2.0**-127])
    assert e8m0_code(amax, format("e2m1"), "rceil").tolist() == [0, 1, 1]
    amax = torch.tensor([2.0**-149, 2.0**-126, 2.0**-125, 2.0**-124])
    for rule in ("floor", "even", "ceil"):
        assert e8m0_code(amax, format("e2m1"), rule).tolist() == [0, 0, 0, 1]


def test_of_equal_errors_the_first_candidate_is_kept():
    x = torch.zeros(1, 32)
    x[0, 0] = 6 * 256  # the tensor scale is 1, and so is that of a block of whole numbers
    x[0, 16:20] = torch.tensor([4.0, 2.0, 1.0, 0.5])
    q = ng.quantize(x, FOUR_OVER_SIX)
    assert q.scales.tolist() == [[256, 1]]  # 4 is nowhere better in the first, but exact in the second
    assert ng.quantize(x, FOUR_OVER_SIX | {"candidates": [4, 6]}).scales.tolist() == [[384, 1]]


def test_scales_that_are_rounded_at_random_are_unbiased():
    x = torch.randn(1, 16, generator=torch.Generator().manual_seed(3)).expand(4000, 16)
    table = {"element": "e2m1", "block": 16, "scale": "e4m3", "scale_rounding": "stochastic"}
    for generator in (torch.Generator().manual_seed(1), torch.rand(4000, 16)):
        scales = ng.quantize(x, table, generator=generator).scales
        exact, (low, high) = x[0].abs().max().item() / 6, sorted(set(scales.flatten().tolist()))
        assert low < exact < high
        share = (exact - low) / (high - low)
        assert abs((scales == high).float().mean() - share) < 5 * math.sqrt(share * (1 - share) / 4000)


def test_a_transform_keeps_products_and_spreads_outliers():
    a, b = torch.randn(8, 64).double(), torch.randn(5, 64).double()
    product = hadamard(a, 16, -1) @ hadamard(b, 16, -1).T
    torch.testing.assert_close(product, a @ b.T, rtol=1e-12, atol=1e-12)
    spike = torch.zeros(1, 16)
    spike[0, 3] = 16.0
    assert torch.equal(hadamard(spike, 16, -1).abs(), torch.full((1, 16), 4.0))
    assert torch.equal(hadamard(a.T, 16, 0), hadamard(a, 16, -1).T)


#: Shapes of several chunks of 700 elements, of blocks that fit none, of one row, of one column.
SHAPES = [(150, 77), (1, 3000), (3000, 1), (4, 60, 33)]
WALKS = list(itertools.product(SHAPES, (-1, 0), ("nearest-even", "stochastic")))


@pytest.mark.parametrize("name", SCALED)
def test_chunks_give_the_numbers_of_the_full_tensor(name, monkeypatch):
    """Each cast in four of the walks, which together are all; the passes in C have no chunks."""
    monkeypatch.setenv("NARROWGAUGE_KERNELS", "0")
    large = blocks.CHUNK
    for shape, axis, rounding in WALKS[SCALED.index(name) % 4 :: 4]:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(3)).bfloat16()
        x[0].view(-1)[:1] = float("inf")
        c, found = make_cast({"cast": name, "rounding": rounding}), []
        for size in (large, 700):
            monkeypatch.setattr(blocks, "CHUNK", size)
            q = ng.quantize(x, c, axis, generator=random_stream(1, 2, 3))
            operand, _ = emulate(x, c, axis, torch.bfloat16, QuantContext(random_stream(1, 2, 3)))
            found.append([q.codes, q.scales, q.tensor_scale, operand.float()])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_the_number_of_kept_channels_is_the_share_rounded_and_at_least_one():
    assert [kept_count(share, 20) for share in (0.01, 0.12, 0.13, 0.5)] == [1, 2, 3, 10]
    assert emulate(torch.zeros(33, 0), cast("mxfp8"), 0, torch.bfloat16)[0].shape == (33, 0)  # none yet


def test_a_table_without_a_name_has_one_of_its_parts_or_is_the_named_cast():
    per_tensor = {"element": "int4", "block": [16, 16], "scale": "e4m3", "tensor_scale": "tensor"}
    assert make_cast(E5M3).name == "e2m1-1x16-e5m3"
    assert make_cast(per_tensor).name == "int4-16x16-e4m3-per-tensor"
    assert make_cast({"element": "e4m3", "scale": "e5m3"}).name == "e4m3-tensor-e5m3"
    assert make_cast({"cast": "mxfp8", "scale": "fp32", "block": 128}) == cast("fp8-1x128")
    assert make_cast({"cast": "nvfp4", "rounding": "stochastic"}).name == "nvfp4"
    mine = parse_recipe('fprop = {element = "e2m1", block = 16, scale = "e5m3"}', "mine")
    assert mine.casts["fprop.x"] == mine.casts["fprop.w"] == make_cast(E5M3)


DERIVED = {
    "stochastic": ({"cast": "mxfp4", "rounding": "stochastic"}, "to_nearest"),
    "kept channels": (KEPT, "of_the_rest"),
    "corrected": (recipe("quartet2").casts["dgrad.dy"], "uncorrected"),
    "plain": ("e4m3", "to_nearest"),
}


@pytest.mark.parametrize("kind", DERIVED)
def test_a_derived_cast_is_the_same_object_each_time(kind):
    table, derived = DERIVED[kind]
    made = make_cast(table)
    assert getattr(made, derived) is getattr(made, derived)
    assert (getattr(made, derived) is made) == (kind == "plain")
    for again in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
        assert again == made
        assert getattr(again, derived) == getattr(made, derived)


@pytest.mark.parametrize("name", ["quartet2", "tetrajet2-outliers"])
def test_no_cast_is_validated_while_a_layer_computes(name, monkeypatch):
    model = ng.convert(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)), name, keep=[])
    x, validated = torch.randn(64, 64, requires_grad=True), []
    for step in (1, 2):
        ng.set_step(model, 0, step, 0, steps=10)
        model(x).sum().backward()
        monkeypatch.setattr(sys.modules[Cast.__module__], "require_valid", validated.append)
    assert validated == []


@pytest.mark.tier("nightly", keep=("nvfp4",))  # nn/test_compile.py keeps some
@pytest.mark.tier("thorough")  # compiles for seconds
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, while it compiles
@pytest.mark.parametrize("name", ["e5m2", "fp8-row", "mxfp8", "mxfp4", "nvfp4"])
def test_compiled_emulation_is_bit_identical(name):
    def both(x, name, axis):
        q = ng.quantize(x, name, axis)
        return *emulate(x, cast(name), axis, torch.bfloat16), q.codes, q.scales

    torch.compiler.reset()  # each cast is compiled separately
    x = torch.randn(64, 96).bfloat16()
    for axis in (-1, 0):
        got = torch.compile(both, fullgraph=True)(x, name, axis)
        for g, w in zip(got, both(x, name, axis), strict=True):
            assert g is w or torch.equal(g, w)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and this machine has none")
@pytest.mark.parametrize("name", SCALED)
def test_a_gpu_gives_the_same_codes_and_scales(name):
    for x in inputs().values():
        if x.ndim == 2:
            cpu, gpu = ng.quantize(x, name), ng.quantize(x.cuda(), name)
            assert torch.equal(cpu.codes, gpu.codes.cpu())
            assert torch.equal(cpu.scales, gpu.scales.cpu())


def test_a_quantized_tensor_shows_its_shape_scales_and_cast_and_no_codes():
    assert repr(ng.quantize(torch.ones(64, 32), "nvfp4")) == (
        "QTensor(shape=(64, 32), dtype=torch.uint8, device=cpu, scales of shape (64, 2), "
        "tensor_scale=0.000372024, cast=Cast('nvfp4', element=e2m1, scale='e4m3', tensor_scale='tensor', "
        "block=(1, 16)))"
    )
    assert "tensor_scale=a tensor of shape (64, 1)" in repr(ng.quantize(torch.ones(64, 32), BY_ROW))
    on_meta = ng.quantize(torch.ones(64, 32, device="meta"), "mxfp4")
    assert "tensor_scale=a tensor of shape ()" in repr(on_meta)
