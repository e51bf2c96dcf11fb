"""The norm kernel against plain torch, bit for bit where numbers are exact, else against doubles.

A norm is a few fp32 operations around one or two sums of a row. In a tree over threads of 16 numbers each no
sum of the rows here errs by more than 32 * 2^-24 of the sum of its magnitudes, the operations around it by
less than that again: FEW = 2^-18 of the magnitudes that meet. Rounding to the output's dtype adds half of its
ulp, eps / 2 of the number.
"""

import pytest
import torch

from narrowgauge.kernels.amax import amax_of_gradient, new_amax
from narrowgauge.kernels.norm import add_norm, norm, reference

FEW = 2.0**-18
TINY = 2.0**-40
KINDS = ["rms", "layer"]
NAN = float("nan")


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def half_ulp(dtype):
    return torch.finfo(dtype).eps / 2


def in_double(s, weight_D, bias_D, eps, kind):
    if kind == "rms":
        return torch.nn.functional.rms_norm(s, weight_D.shape, weight_D, eps)
    return torch.nn.functional.layer_norm(s, weight_D.shape, weight_D, bias_D, eps)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_exact_numbers_come_out_bit_for_bit(device, kind, out_dtype):
    """Rows of +-2 have mean 0 and mean square 4, so that every step is exact; LayerNorm of 5 +-2 as well."""
    sign_MD = torch.tensor([1.0, -1.0]).repeat(3, 13)
    s = (2 * sign_MD + (5 if kind == "layer" else 0)).to(device)
    delta = torch.arange(26.0).expand(3, 26).to(device, torch.bfloat16)
    weight_D = (2.0 ** (torch.arange(26) % 5 - 2)).to(device, torch.float16)
    bias_D = (torch.arange(26.0) - 7).to(device) if kind == "layer" else None
    stream, y, known = add_norm(s - delta, delta, weight_D, bias_D, TINY, kind, out_dtype)
    assert torch.equal(stream, s)
    expected = reference(s, weight_D, bias_D, TINY, kind, out_dtype)
    assert y.dtype == out_dtype
    assert torch.equal(y, expected)
    assert torch.equal(known.amax, expected.float().abs().max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("D", [1, 7, 64, 100])
@pytest.mark.parametrize(
    ("x_dtype", "delta_dtype", "out_dtype"),
    [
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.float32, None, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.float16),
    ],
)
def test_random_rows_are_as_near_as_rounding_allows(device, kind, D, x_dtype, delta_dtype, out_dtype):
    x = normal(2, 3, D, dtype=x_dtype).to(device)
    delta = None if delta_dtype is None else normal(2, 3, D, seed=1, dtype=delta_dtype).to(device)
    weight_D, bias_D = normal(D, seed=2).to(device), normal(D, seed=3, dtype=torch.bfloat16).to(device)
    bias_D = bias_D if kind == "layer" else None
    stream, y, known = add_norm(x, delta, weight_D, bias_D, 1e-5, kind, out_dtype)
    assert torch.equal(stream, x if delta is None else x + delta)
    wide_bias_D = None if bias_D is None else bias_D.double()
    exact = in_double(stream.double(), weight_D.double(), wide_bias_D, 1e-5, kind)
    # What meets: the row's largest number over its deviation, times the weight; and the bias.
    centered = stream.double() - (stream.double().mean(-1, keepdim=True) if kind == "layer" else 0)
    scale = (centered.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    meets = stream.double().abs().amax(-1, keepdim=True) * scale * weight_D.abs() + exact.abs()
    assert ((y.double() - exact).abs() <= half_ulp(out_dtype) * exact.abs() + FEW * meets).all()
    assert torch.equal(known.of(y), y.float().abs().max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("delta_dtype", [torch.bfloat16, torch.float32, None])
def test_gradients_are_those_of_double_precision(device, kind, delta_dtype, monkeypatch):
    """With the gradient that comes back to the sum. Seven rows on three programs are three, three and one."""
    from narrowgauge.kernels.triton import norm as on_gpu

    monkeypatch.setattr(on_gpu, "PROGRAMS", 3)
    shape, D = (1, 7, 24), 24
    x = normal(*shape).to(device).requires_grad_()
    delta = None
    if delta_dtype is not None:
        delta = normal(*shape, seed=1, dtype=delta_dtype).to(device).requires_grad_()
    weight_D = normal(D, seed=2, dtype=torch.bfloat16).to(device).requires_grad_()
    bias_D = normal(D, seed=3).to(device).requires_grad_() if kind == "layer" else None
    dstream, dy = normal(*shape, seed=4).to(device), normal(*shape, seed=5, dtype=torch.bfloat16).to(device)
    leaves = [t for t in (x, delta, weight_D, bias_D) if t is not None]
    outputs = add_norm(x, delta, weight_D, bias_D, 1e-5, kind, torch.bfloat16)[:2]
    got = torch.autograd.grad(outputs, leaves, [dstream, dy])

    wide = [None if t is None else t.detach().double().requires_grad_() for t in (x, delta, weight_D, bias_D)]
    s = (x if delta is None else x + delta).detach().double().requires_grad_()
    y = in_double(s, *wide[2:], 1e-5, kind)
    ds, *exact = torch.autograd.grad(
        [s * 1, y], [s, *wide[2 : 3 + (bias_D is not None)]], [dstream.double(), dy.double()]
    )
    exact = [ds] * (1 if delta is None else 2) + exact
    for leaf, g, e in zip(leaves, got, exact, strict=True):
        assert g.dtype == leaf.dtype
        size = e.abs().amax(-1, keepdim=True) + e.abs().mean() if e.ndim > 1 else e.abs().max()
        assert ((g.double() - e).abs() <= half_ulp(g.dtype) * e.abs() + 4 * FEW * size).all()
    if delta_dtype == torch.bfloat16:
        assert torch.equal(amax_of_gradient(got[1]), got[1].float().abs().max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)])
def test_terms_that_are_kept_give_the_gradients_of_their_sum_bit_for_bit(device, kind, dtypes):
    """A sum in bf16 is as short as a term, and is kept."""
    x, delta = (normal(5, 24, seed=s, dtype=d).to(device) for s, d in enumerate(dtypes))
    weight_D, bias_D = normal(24, seed=2).to(device), normal(24, seed=3).to(device)
    dstream, dy = normal(5, 24, seed=4).to(device), normal(5, 24, seed=5, dtype=torch.bfloat16).to(device)
    found = []
    for keeps_terms in (False, True):
        leaves = [t.clone().requires_grad_() for t in (x, delta, weight_D)]
        bias = bias_D if kind == "layer" else None
        stream, y, _ = add_norm(*leaves, bias, 1e-5, kind, torch.bfloat16, keeps_terms)
        kept = [t for t in stream.grad_fn.saved_tensors if t is not None and t.shape == x.shape]
        assert len(kept) == (2 if keeps_terms and dtypes[0] == torch.float32 else 1)
        found.append(torch.autograd.grad([stream, y], leaves, [dstream.to(stream.dtype), dy]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_stream_as_narrow_as_its_addend_has_one_gradient_and_its_amax(device, kind, dtype):
    """The digits equal those where the sum is rounded before the norm."""
    x, delta = (normal(5, 24, seed=s, dtype=dtype).to(device) for s in (0, 1))
    weight_D, bias_D = normal(24, seed=2).to(device), normal(24, seed=3).to(device)
    bias_D = bias_D if kind == "layer" else None
    dstream, dy = (normal(5, 24, seed=s, dtype=dtype).to(device) for s in (4, 5))
    leaves = [t.requires_grad_() for t in (x, delta, weight_D)]
    stream, y, _ = add_norm(*leaves, bias_D, 1e-5, kind, dtype)
    got = torch.autograd.grad([stream, y], leaves, [dstream, dy])
    assert stream.dtype == dtype
    assert torch.equal(got[0], got[1])
    assert torch.equal(amax_of_gradient(got[1]), got[1].float().abs().max())

    total = (x.detach().float() + delta.detach().float()).to(dtype).requires_grad_()
    other, other_y, _ = add_norm(total, None, weight_D, bias_D, 1e-5, kind, dtype)
    ds, dw = torch.autograd.grad([other, other_y], [total, weight_D], [dstream, dy])
    pairs = ((stream, other), (y, other_y), (got[0], ds), (got[2], dw))
    assert all(torch.equal(a, b) for a, b in pairs)


def test_without_the_stream_used_and_without_its_norm_used(device):
    x, weight_D = normal(3, 8).to(device).requires_grad_(), torch.ones(8, device=device, requires_grad=True)
    y = norm(x, weight_D, None, 1e-5, "rms", torch.float32)
    (alone,) = torch.autograd.grad(y, x, torch.ones_like(y))
    stream, y, _ = add_norm(x, None, weight_D, None, 1e-5, "rms", torch.float32)
    (both,) = torch.autograd.grad([stream, y], x, [torch.full_like(x, 2), torch.ones_like(y)])
    torch.testing.assert_close(both, alone + 2, rtol=0, atol=1e-6)
    stream, y, _ = add_norm(x, None, weight_D, None, 1e-5, "rms", torch.float32)
    (passed,) = torch.autograd.grad(stream, x, torch.full_like(x, 2))
    assert torch.equal(passed, torch.full_like(x, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_bad_rows_stay_bad_and_leave_the_others_alone(device, kind):
    x = normal(6, 10).to(device)
    x[1, 3], x[2, 4], x[3] = NAN, torch.inf, 0
    x[4], x[5] = x[4] * 2.0**-130, x[5] * 2.0**70  # subnormal; and squares beyond fp32
    weight_D = torch.ones(10, device=device)
    bias_D = torch.zeros(10, device=device) if kind == "layer" else None
    _, y, known = add_norm(x, None, weight_D, bias_D, 1e-5, kind, torch.bfloat16)
    expected = reference(x, weight_D, bias_D, 1e-5, kind, torch.bfloat16)
    rows = [1, 2, 3, 4] if kind == "layer" else [1, 2, 3, 4, 5]  # torch's LayerNorm sums in another way
    torch.testing.assert_close(y[rows], expected[rows], rtol=2**-7, atol=0, equal_nan=True)
    assert y[0].isfinite().all()
    assert not y[1].isfinite().any()
    assert not y[3].any()
    assert known.amax.isnan()


def test_an_output_beyond_its_dtype_has_an_amax_of_infinity(device):
    x = torch.tensor([[1.0, -1.0, 1.0, 1.0]], device=device)
    weight_D = torch.full((4,), 1e6, device=device)
    _, y, known = add_norm(x, None, weight_D, None, 1e-5, "rms", torch.float16)
    assert y.isinf().all()
    assert known.amax == torch.inf


def test_every_element_is_written(device):
    from narrowgauge.kernels.triton import norm as on_gpu

    M, D = 5, 37
    x, weight_D = normal(M, D).to(device), torch.ones(D, device=device)
    poisoned = [
        torch.full((M, D), NAN, device=device, dtype=d) for d in [torch.float32] * 2 + [torch.bfloat16] * 2
    ]
    stream, dx, y, ddelta = poisoned
    mean_M, scale_M = torch.full((2, M), NAN, device=device)
    forth, back = new_amax(device), new_amax(device)
    on_gpu.launch_forward(x, x, weight_D, weight_D, stream, y, mean_M, scale_M, forth, 1e-5)
    sums = on_gpu.launch_backward(y, x, stream, None, weight_D, mean_M, scale_M, dx, ddelta, back, True)
    for t in (*poisoned, mean_M, scale_M, *sums):
        assert t.isfinite().all()
    assert (forth, back) == (y.abs().max(), ddelta.abs().max())


def test_what_is_not_contiguous(device):
    x = normal(6, 5).to(device).T.requires_grad_()
    delta = normal(5, 12, dtype=torch.bfloat16).to(device)[:, ::2]
    weight_D = normal(12).to(device)[::2]
    stream, y, _ = add_norm(x, delta, weight_D, None, 1e-5, "rms", torch.bfloat16)
    assert torch.equal(stream, x + delta)
    assert torch.equal(
        y, add_norm(*(t.contiguous() for t in (x, delta, weight_D)), None, 1e-5, "rms", y.dtype)[1]
    )
    y.sum().backward()
    assert x.grad.isfinite().all()


def test_a_compiler_sees_plain_torch(device):
    x, weight_D = normal(2, 8).to(device), normal(8, seed=1).to(device)
    arguments = (x, weight_D, None, 1e-5, "rms", torch.bfloat16)
    arguments = (x, None, *arguments[1:])
    _, y, known = torch.compile(add_norm, backend="eager", fullgraph=True)(*arguments)
    assert torch.equal(y, reference(x, *arguments[2:]))
    assert known is None
    assert add_norm(*arguments)[2] is not None
