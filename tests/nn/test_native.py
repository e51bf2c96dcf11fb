"""Matmuls on the hardware's own units: the layout that they are given, and what comes out.

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
from narrowgauge.nn import Linear, convert
from narrowgauge.nn.gemm import arguments, multiply, native_product, quantized_operand, tiled
from narrowgauge.quantization import make_cast, quantize
from narrowgauge.recipes import choose_backend, device_facts, recipe, recipe_names

HAS_CPU_KERNELS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
needs_cpu_kernels = pytest.mark.skipif(not HAS_CPU_KERNELS, reason="torch before 2.13 has no CPU kernel")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

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
SHAPES = [(1, 1, 1), (5, 33, 7), (130, 260, 150), (256, 128, 384)]
ON_CPU = ["fp8", "fp8-delayed", "fp8-row", "fp8-row-hp", "fp8-fnuz"]


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
    """The block scale of each element as the documentation of the kernel places it."""
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
    across = math.ceil(blocks / 4)  # tiles next to each other
    for r in range(rows):
        for c in range(blocks):
            tile = (r // 128) * across + c // 4
            at = tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4
            out[r, c * size : (c + 1) * size] = values[at]
    return out


@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("shape", SHAPES[:3])
@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_the_arguments_mean_the_same_numbers(a, b, shape, axis):
    (x, w), (x_MK, w_NK) = pair(a, b, *shape, axis)
    given = arguments(x, w)
    x_read = read_elements(given["mat_a"], a)
    w_read = read_elements(given["mat_b"].T, b)
    for read, which in ((x_read, "a"), (w_read, "b")):
        kinds, tensors = given[f"scale_recipe_{which}"], given[f"scale_{which}"]
        read *= read_scales(kinds, tensors, read.shape)
        for whole in tensors[1:]:
            read *= whole
    m, k, n = shape
    assert torch.equal(x_read[:m, :k], x_MK)
    assert torch.equal(w_read[:n, :k], w_NK)
    for beyond in (x_read[m:], x_read[:, k:], w_read[n:], w_read[:, k:]):  # what padding adds
        assert not beyond.any()


@pytest.mark.parametrize(("a", "b"), [p for p in PAIRS if "nvfp4" not in p[0]])
def test_what_fits_is_not_copied(a, b):
    (x, w), _ = pair(a, b, 256, 128, 384)
    given = arguments(x, w)
    assert given["mat_a"].data_ptr() == x.codes.data_ptr()
    assert given["mat_b"].data_ptr() == w.codes.data_ptr()
    if a == "fp8-row":
        assert given["scale_a"][0].data_ptr() == x.scales.data_ptr()


@pytest.mark.parametrize(
    ("a", "b", "is_fast"),
    [("e4m3", "e4m3", True), ("fp8-row", "fp8-row", True), ("fp8-1x128", "fp8-128x128", False)],
)
def test_products_in_blocks_are_summed_in_fp32(a, b, is_fast, monkeypatch):
    """Only the call itself is left out: no CPU has matmuls in blocks."""
    asked = {}

    def taken(mat_a, mat_b, use_fast_accum, **_):
        asked["fast"] = use_fast_accum
        return torch.empty(mat_a.shape[0], mat_b.shape[1])

    monkeypatch.setattr("narrowgauge.nn.gemm.torch_scaled_mm", taken)
    native_product(*pair(a, b, 16, 128, 16)[0], torch.bfloat16, fast=True)
    assert asked["fast"] == is_fast


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_torch_takes_the_arguments_for_a_gpu(a, b, shape):
    (x, w), _ = pair(a, b, *shape)
    given = arguments(x, w)

    def without_storage(value):
        if isinstance(value, list):
            return [without_storage(v) for v in value]
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")

    with FakeTensorMode():
        result = scaled_mm(**{k: without_storage(v) for k, v in given.items()})
    assert result.shape[0] >= shape[0]
    assert result.shape[1] >= shape[2]


def test_tiles_of_scales():
    scales = torch.arange(200 * 6).to(torch.uint8).view(200, 6)
    flat = tiled(scales)
    assert flat.shape == (256 * 8,)
    for r, c in ((0, 0), (1, 0), (0, 1), (31, 3), (32, 0), (127, 3), (0, 4), (128, 0), (199, 5)):
        at = (r // 128 * 2 + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
        assert flat[at] == scales[r, c]


@needs_cpu_kernels
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("a", "b"), PAIRS[:5])
def test_a_product_on_torchs_cpu_kernel(a, b, shape):
    (x, w), (x_MK, w_NK) = pair(a, b, *shape)
    got = native_product(x, w, torch.bfloat16).double()
    exact = x_MK.double() @ w_NK.double().T
    slack = 1e-4 * (x_MK.double().abs() @ w_NK.double().abs().T)
    assert ((got - exact).abs() <= exact.abs() * 2.0**-8 + slack).all()


@needs_cpu_kernels
@pytest.mark.parametrize(("a", "b"), PAIRS[:5])
def test_ones_give_twos(a, b):
    """MS-AMP's case: ones (4, 2) times ones (2, 3), sizes that no hardware takes without padding."""
    x, w = (quantized_operand(quantize(torch.ones(rows, 2), c), -1) for rows, c in ((4, a), (3, b)))
    assert torch.equal(native_product(x, w, torch.bfloat16), torch.full((4, 3), 2.0).bfloat16())


def both(name, shape, bias, saved=None):
    """(output, input gradient, weight gradient) of a layer, native and emulated."""
    r = recipe(name) if saved is None else recipe(name).with_places({"saved": saved})
    results = []
    for native in (True, False):
        torch.manual_seed(0)
        layer = Linear(torch.nn.Linear(shape[-1], 24, bias=bias), r, 0)
        layer.spec = replace(layer.spec, native=native)  # what a GPU of the right generation decides
        x = torch.randn(shape).bfloat16().requires_grad_()
        for step in (1, 2):
            layer.set_position(1, step, 0)
            layer.zero_grad()
            y = layer(x)
            y.backward(torch.randn(y.shape).bfloat16())
        results.append((y.double(), x.grad.double(), layer.weight.grad.double()))
    return results


@needs_cpu_kernels
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(40, 32), (2, 5, 33), (1, 7), (2, 3, 4, 48)])
@pytest.mark.parametrize("name", ON_CPU)
def test_a_native_layer_gives_what_the_emulated_one_gives(name, shape, bias):
    for native, emulated in zip(*both(name, shape, bias), strict=True):
        error = (native - emulated).square().mean()
        assert 10 * torch.log10(emulated.square().mean() / error) > 45  # bf16's own rounding is at 50


@needs_cpu_kernels
@pytest.mark.parametrize("name", ["fp8", "fp8-row"])
def test_what_is_kept_changes_nothing(name):
    kept = {s: both(name, (40, 32), False, s)[0] for s in ("input", "operand")}
    if name == "fp8":
        for a, b in zip(*kept.values(), strict=True):
            assert torch.equal(a, b)
    else:
        assert torch.equal(kept["input"][0], kept["operand"][0])


@needs_cpu_kernels
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["fp8", "fp8-row"])
def test_nothing_non_finite_comes_out_finite(name, poison):
    layer = Linear(torch.nn.Linear(32, 16), recipe(name), 0)
    layer.spec = replace(layer.spec, native=True)
    x = torch.randn(20, 32)
    x[3, 5] = poison
    y = layer(x)
    y.sum().backward()
    assert not y[3].isfinite().any()
    assert y[4].isfinite().any() == (name == "fp8-row")
    assert not layer.weight.grad[:, 5].isfinite().any()


@pytest.mark.tier("nightly", keep=1)
@pytest.mark.tier("thorough")  # compiles for seconds; test_compile.py keeps some
@needs_cpu_kernels
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Dynamo detected a call to a")  # torch's own
@pytest.mark.parametrize(
    "name",
    ON_CPU,  # the last two are the second and the first with other dtypes
)
def test_it_compiles_whole(name):
    torch._dynamo.reset()
    layer = Linear(torch.nn.Linear(32, 16), recipe(name), 0)
    layer.spec = replace(layer.spec, native=True)
    layer.set_position(1, 1, 0)
    x = torch.randn(20, 32, requires_grad=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))


def test_operands_of_two_kinds_do_not_meet():
    (x, w), _ = pair("e4m3", "e4m3", 4, 4, 4)
    with pytest.raises(AssertionError):
        multiply(x, w.codes, torch.bfloat16)


def native_here():
    if not torch.cuda.is_available():
        return []
    facts = device_facts(torch.device("cuda"))
    return [
        n for n in recipe_names() if recipe(n).is_narrow and choose_backend(recipe(n), facts).name == "native"
    ]


@needs_gpu
@pytest.mark.parametrize("name", native_here() or ["fp8"])
def test_on_this_gpu(name):
    results = []
    for backend in ("native", "emulated"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(260, 200), torch.nn.GELU(), torch.nn.Linear(200, 120)
        ).cuda()
        convert(model, recipe(name), backend=backend)
        x = torch.randn(3, 50, 260, device="cuda", requires_grad=True)
        y = model(x)
        y.square().mean().backward()
        results.append((y, x.grad, model[0].weight.grad, model[2].weight.grad))
    for native, emulated in zip(*results, strict=True):
        error = (native - emulated).double().square().mean()
        assert 10 * torch.log10(emulated.double().square().mean() / error) > 40
