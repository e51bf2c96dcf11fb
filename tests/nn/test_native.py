"""Matmuls on the hardware's own units: the layout that they are given, what comes out, and the self-test.

torch has CPU kernels behind the same call for one scale a tensor and a row (since 2.13): with them the whole
layer is run here. For the other kinds, the arguments are read as cuBLAS documents them, entry by entry, and
have to mean the same numbers; torch's own checks for CUDA see them as tensors without storage.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_mm

from narrowgauge.formats import decode, format, unpack
from narrowgauge.nn import self_test
from narrowgauge.nn.gemm import arguments, native_product, quantized_operand
from narrowgauge.nn.self_test import product_failure
from narrowgauge.quantization import make_cast, quantize
from narrowgauge.recipes import recipe
from nn.layers import batch, decibels, make, steps

HAS_CPU_KERNELS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
needs_cpu_kernels = pytest.mark.skipif(not HAS_CPU_KERNELS, reason="torch before 2.13 has no CPU kernel")
CPU = torch.device("cpu")

#: Casts of two operands.
PAIRS = [
    ("e4m3", "e4m3"),
    ("e5m2", "e4m3"),
    ("fp8-row", "fp8-row"),
    ("fp8-row", "e4m3"),
    ("e4m3", "fp8-row"),
    ("fp8-1x128", "fp8-1x128"),
    ("fp8-1x128", "fp8-128x128"),
    ("fp8-128x128", "fp8-1x128"),
    ("mxfp8", "mxfp8"),
    ("mxfp8-e5m2", "mxfp8"),
    ("nvfp4", "nvfp4"),
    ("nvfp4", "nvfp4-2d"),
]
SHAPES = [(1, 1, 1), (5, 33, 7), (130, 260, 150)]


def pair(a, b, m, k, n, axis=-1):
    """Two quantized operands and the matrices they stand for; `axis` 0 stores them along the contraction."""
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(m, k, generator=g), torch.randn(n, k, generator=g)
    qs = [quantize(t if axis == -1 else t.T, c, axis) for t, c in ((x, a), (w, b))]
    wide = [q.dequantize() if axis == -1 else q.dequantize().T for q in qs]
    return [quantized_operand(q, axis) for q in qs], wide


def read_elements(matrix, cast):
    """Values of a matrix of torch's narrow dtypes."""
    raw, element = matrix.view(torch.uint8), make_cast(cast).element
    return decode(unpack(raw, element, raw.shape[1] * 8 // element.bits), element)


def read_scales(kinds, tensors, shape):
    """The scale of each element as the documentation of the kernel places it."""
    rows, columns = shape
    scales, out = tensors[0], torch.empty(shape)
    match kinds[0].name:
        case "TensorWise":
            return out.fill_(scales.item())
        case "RowWise":
            return scales.reshape(-1, 1).expand(shape)
        case "BlockWise1x128":
            assert scales.stride() == (1, rows)
            return scales.repeat_interleave(128, 1)
        case "BlockWise128x128":
            assert scales.stride() == (1, scales.shape[0])
            assert scales.shape[0] % 4 == 0
            return scales.T.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    size, name = (32, "e8m0") if kinds[0].name == "BlockWise1x32" else (16, "e4m3")
    values = decode(scales.view(torch.uint8), format(name))
    blocks = math.ceil(columns / size)
    r, c = torch.arange(rows)[:, None], torch.arange(blocks)
    at = (r // 128 * math.ceil(blocks / 4) + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
    return values[at].repeat_interleave(size, 1)[:, :columns]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_the_arguments_mean_the_same_numbers_and_torch_takes_them_for_a_gpu(a, b, shape):
    m, k, n = shape
    for axis in (-1, 0):
        (x, w), (x_MK, w_NK) = pair(a, b, *shape, axis)
        given = arguments(x, w)
        x_read, w_read = read_elements(given["mat_a"], a), read_elements(given["mat_b"].T, b)
        for read, which in ((x_read, "a"), (w_read, "b")):
            scales = given[f"scale_{which}"]
            read *= read_scales(given[f"scale_recipe_{which}"], scales, read.shape)
            for whole in scales[1:]:
                read *= whole
        assert torch.equal(x_read[:m, :k], x_MK)
        assert torch.equal(w_read[:n, :k], w_NK)
        for beyond in (x_read[m:], x_read[:, k:], w_read[n:], w_read[:, k:]):  # what padding adds
            assert not beyond.any()

    def without_storage(value):
        if isinstance(value, list):
            return [without_storage(v) for v in value]
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")

    with FakeTensorMode():
        result = scaled_mm(**{k: without_storage(v) for k, v in given.items()})
    assert result.shape[0] >= m
    assert result.shape[1] >= n


@pytest.mark.parametrize(("a", "b", "is_fast"), [("e4m3", "e4m3", True), ("fp8-1x128", "fp8-128x128", False)])
def test_products_in_blocks_are_summed_in_fp32(a, b, is_fast, monkeypatch):
    """Only the call itself is left out: no CPU has matmuls in blocks."""
    asked = {}

    def taken(mat_a, mat_b, use_fast_accum, **_):
        asked["fast"] = use_fast_accum
        return torch.empty(mat_a.shape[0], mat_b.shape[1])

    monkeypatch.setattr("narrowgauge.nn.gemm.torch_scaled_mm", taken)
    native_product(*pair(a, b, 16, 128, 16)[0], torch.bfloat16, fast=True)
    assert asked["fast"] == is_fast


def layer_products(name, native, k, bias=True, saved=""):
    """(y, dx, dw) of a layer's second step, with tokens of one shape for each number of inputs."""
    places = {"saved": saved} if saved else {}
    layer = make(recipe(name).with_places(places), k, 24, bias)
    layer.spec = replace(layer.spec, native=native)  # what a GPU of the right generation decides
    x, dy = batch(*{32: (40,), 33: (2, 5), 7: (1,), 48: (2, 3, 4)}[k], k=k, n=24)
    return steps(layer, x.bfloat16().requires_grad_(), dy.bfloat16())[-4 if bias else -3 :][:3]


@needs_cpu_kernels
@pytest.mark.parametrize("name", ["fp8", "fp8-delayed", "fp8-row", "fp8-row-hp", "fp8-fnuz"])
def test_a_native_layer_gives_what_the_emulated_one_gives(name):
    for k in (32, 33, 7, 48):
        for native, emulated in zip(
            *(layer_products(name, n, k, k > 32) for n in (True, False)), strict=True
        ):
            assert decibels(native, emulated.double()) > 45  # bf16's own rounding is at 50
    kept = [layer_products(name, True, 32, saved=saved) for saved in ("input", "operand")]
    count = 3 if name == "fp8" else 1  # blocks along the tokens are of the numbers that are kept
    assert all(torch.equal(*both) for both in list(zip(*kept, strict=True))[:count])


@pytest.mark.parametrize("x", ["e4m3", "e5m2", "fp8-row", "fp8-1x128", "mxfp8", "nvfp4"])
def test_the_self_test_passes_what_torch_multiplies_on_a_cpu_and_says_why_not(x):
    before = torch.get_rng_state()
    random = {"cast": x, "rounding": "stochastic"} if x == "nvfp4" else x
    failure = product_failure.__wrapped__(make_cast(random), make_cast("e4m3" if x == "e5m2" else x), CPU)
    assert (failure == "") == (HAS_CPU_KERNELS and x in ("e4m3", "e5m2", "fp8-row"))
    assert torch.equal(before, torch.get_rng_state()), "no random number is used up"


@needs_cpu_kernels
@pytest.mark.parametrize("factor", [1.02, 0.5, float("nan")])
def test_the_self_test_sees_wrong_numbers(factor, monkeypatch):
    """The product is torch's, times what a scale at the wrong place or a lost bit would do."""
    product = self_test.native_product
    monkeypatch.setattr(self_test, "native_product", lambda *a, **k: product(*a, **k) * factor)
    failure = product_failure.__wrapped__(make_cast("e4m3"), make_cast("e4m3"), CPU)
    assert failure.endswith("of 16384 results are wrong")
