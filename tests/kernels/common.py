"""What several tests of kernels share: numbers and their comparison."""

import pytest
import torch

from narrowgauge.quantization.passes import build

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAN, INF = float("nan"), float("inf")
of_traced_code = pytest.mark.filterwarnings(  # of torch's own tracing
    "ignore::DeprecationWarning", "ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped function"
)
needs_c = pytest.mark.skipif(not build.compiler(), reason="there is no C compiler")


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same_bits(a, b):
    """Equal bit for bit; any NaN is any other, of whatever sign."""
    if a is None or b is None:
        return a is b
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    return bool(((a == b) & (a.signbit() == b.signbit()) | a.isnan() & b.isnan()).all())


def assert_same(ours, theirs):
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert same_bits(a, b), i


def assert_c_is_torch(outcome, monkeypatch):
    """`outcome` gives tensors and the name of the autograd function that made them, also of three threads."""
    found, name = outcome()
    assert name.startswith("_"), "by a function of this package"
    assert_same_for_threads(lambda: outcome()[0], monkeypatch)
    with monkeypatch.context() as patch:
        patch.setenv("NARROWGAUGE_KERNELS", "0")
        plain, name = outcome()
    assert not name.startswith("_")
    assert_same(found, plain)


def assert_same_for_threads(run, monkeypatch):
    """`run` gives the same bits where three threads share the work."""
    one, before = run(), torch.get_num_threads()
    with monkeypatch.context() as patch:
        patch.setattr("narrowgauge.quantization.passes.in_c.A_THREAD", 100)
        torch.set_num_threads(3)
        try:
            assert_same(run(), one)
        finally:
            torch.set_num_threads(before)
