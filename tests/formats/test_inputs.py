"""Every function for users over kinds of tensors and dtypes: right values, or one sentence."""

import itertools

import pytest
import torch

import narrowgauge as ng
from narrowgauge.formats import decode, encode, format_names, holds, torch_dtype
from narrowgauge.quantization import emulate, make_cast
from narrowgauge.quantization.gauges.figures import gauge_operand
from narrowgauge.system.errors import UserError

X = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
DOORS = {
    "round_to": lambda x: ng.round_to(x, "e4m3"),
    "encode": lambda x: encode(x, ng.format("e4m3")),
    "quantize": lambda x: ng.quantize(x, "mxfp8"),
    "emulate": lambda x: emulate(x, make_cast("nvfp4"), -1, torch.bfloat16),
    "emulate wide": lambda x: emulate(x, make_cast("bf16"), -1, torch.bfloat16),
    "gauge": lambda x: gauge_operand(x, x, make_cast("mxfp8"), -1),
}
REFUSED = {
    "complex": (lambda: X.to(torch.complex64), "x is of dtype torch.complex64: .* give torch.view_as_real"),
    "integer": (lambda: X.long(), "x is of dtype torch.int64: .* give torch.Tensor.float"),
    "fp4 pairs": (lambda: torch.zeros(4, 64, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "float4"),
    "quantized": (lambda: torch.quantize_per_tensor(X, 0.1, 0, torch.qint8), "qint8: .* give torch.dequant"),
    "sparse": (lambda: X.to_sparse(), r"x is torch.sparse_coo: .* give x.to_dense\(\)"),
    "nested": (lambda: torch.nested.nested_tensor([X[0], X[1, :32]]), r"x is nested: .* x.unbind\(\)"),
    "list": (lambda: [1.0], "x is of type list: it must be a tensor"),
}
FLOATS = [torch.float64, *filter(None, (torch_dtype(ng.format(name)) for name in format_names()))]
WIDE = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, of nested and quantized tensors
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_dense_floating_tensor_is_refused(kind):
    make, sentence = REFUSED[kind]
    for door in DOORS.values():
        with pytest.raises(UserError, match=sentence):
            door(make())


@pytest.mark.parametrize("dtype", FLOATS)
def test_round_to_gives_values_of_the_format_in_a_dtype_that_has_them(dtype):
    edges = torch.tensor([448, 57344, 65504, 66246, 3.3e38, 0.3, 1e-5, -0.3, -65504.0, 0.0])
    x = edges.to(dtype)
    for name in format_names():
        y, exact = ng.round_to(x, name), ng.round_to(x.double(), name)
        assert torch.equal(y.double().nan_to_num(-1e300), exact.nan_to_num(-1e300)), name
        assert y.dtype in (dtype, torch.float32)


@pytest.mark.parametrize("dtype", FLOATS)
def test_decode_gives_every_value_or_refuses_the_dtype(dtype):
    for fmt in (ng.format(name) for name in format_names()):
        if fmt.bits <= 8:
            codes = torch.arange(2**fmt.bits, dtype=torch.uint8)
            if not holds(dtype, fmt):
                assert dtype not in (torch.float64, torch.float32, torch.bfloat16)
                with pytest.raises(UserError, match=f"does not hold every value of {fmt.name}"):
                    decode(codes, fmt, dtype)
                continue
            values = decode(codes, fmt, dtype)
            assert torch.equal(
                values.double().nan_to_num(-1e300), decode(codes, fmt).double().nan_to_num(-1e300)
            )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e5m2, torch.float8_e4m3fn])
def test_quantize_and_emulate_compute_with_the_float32_of_a_tensor(dtype):
    x = (X * 3).to(dtype)
    for name in ("e4m3", "mxfp8", "nvfp4", {"cast": "mxfp4", "hadamard": 32}):
        q, same = ng.quantize(x, name), ng.quantize(x.float(), name)
        assert torch.equal(q.dequantize(), same.dequantize())
        seen = [emulate(t, make_cast(name), -1, torch.bfloat16)[0] for t in (x, x.float())]
        assert torch.equal(*seen)


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "mxfp8", "mxint8", "nvfp4", "fp8-row", "mxfp4"])
def test_stored_and_emulated_values_are_finite_and_equal_in_every_dtype(name):
    for scale, dtype in itertools.product((1.0, 1e6, 1e-9), WIDE):
        q = ng.quantize(X * scale, name)
        limit, values = torch.finfo(dtype).max, q.dequantize()
        assert torch.equal(q.dequantize(dtype), values.clamp(-limit, limit).to(dtype))
        operand, above = emulate(X * scale, make_cast(name), -1, dtype)
        assert torch.equal(operand.float() * (1.0 if above is None else above), values)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_a_value_beyond_float32_is_infinite_there_as_in_a_gemm_and_clamped_in_other_dtypes(name):
    most = torch.finfo(torch.float32).max
    x = torch.full((1, 32), most)
    q = ng.quantize(-x, name)
    assert (q.dequantize() == -torch.inf).all()
    assert torch.equal(emulate(-x, make_cast(name), -1, torch.float32)[0], q.dequantize())
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert (q.dequantize(dtype).double() == -min(most, torch.finfo(dtype).max)).all()


def test_a_dtype_without_the_range_of_scales_is_refused():
    for dtype in (torch.int32, torch.float8_e4m3fn, torch.complex64):
        with pytest.raises(UserError, match=r"dtype = torch\..*: it must be one of torch.float32, torch.bf"):
            ng.quantize(X, "mxfp8").dequantize(dtype)


def test_encode_rounds_or_refuses_what_has_no_code():
    e4m3, e2m1 = ng.format("e4m3"), ng.format("e2m1")
    assert encode(torch.tensor([560.0, -1e9, torch.inf, 0.3]), e4m3).tolist() == [0x7E, 0xFE, 0x7F, 0x2A]
    assert encode(torch.tensor([0.8, 7.0, -5.1]), e2m1).tolist() == [2, 7, 0xF]
    for wrong in (torch.nan, torch.inf):
        with pytest.raises(UserError, match="e2m1 has no code for NaN, infinity"):
            encode(torch.tensor([wrong]), e2m1)
    assert encode(torch.tensor([-1.0]), ng.format("e8m0")).tolist() == [0xFF]


def test_emulate_refuses_what_autograd_follows():
    x = X.clone().requires_grad_()
    with pytest.raises(UserError, match=r"x requires a gradient, .* give x.detach\(\)"):
        emulate(x, make_cast("mxfp4"), -1, torch.float32)
    with torch.no_grad():
        emulate(x, make_cast("mxfp4"), -1, torch.float32)
