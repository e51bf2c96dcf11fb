"""A product is native only where it is seen to be right."""

import pytest
import torch

from narrowgauge.nn.self_test import product_failure, verified_backend
from narrowgauge.quantization import make_cast
from narrowgauge.recipes import recipe

CPU = torch.device("cpu")
needs_cpu_kernels = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13), reason="torch before 2.13 has no CPU kernel"
)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_cpu_kernels
@pytest.mark.parametrize(("x", "w"), [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("fp8-row", "fp8-row")])
def test_what_torch_multiplies_on_a_cpu_passes(x, w):
    assert product_failure(make_cast(x), make_cast(w), CPU) == ""


@pytest.mark.parametrize("cast", ["fp8-1x128", "mxfp8", "nvfp4"])
def test_what_it_does_not_multiply_fails_with_torchs_reason(cast):
    assert product_failure(make_cast(cast), make_cast(cast), CPU) != ""


@needs_cpu_kernels
@pytest.mark.parametrize("factor", [1.02, 0.5, float("nan")])
def test_wrong_numbers_are_seen(factor, monkeypatch):
    """The product is torch's, times what a scale at the wrong place or a lost bit would do."""
    from narrowgauge.nn import self_test

    product = self_test.native_product
    monkeypatch.setattr(self_test, "native_product", lambda *a, **k: product(*a, **k) * factor)
    failure = product_failure.__wrapped__(make_cast("e4m3"), make_cast("e4m3"), CPU)
    assert failure.endswith("of 16384 results are wrong")


def test_no_random_number_is_used_up():
    before = torch.get_rng_state()
    product_failure.__wrapped__(
        make_cast({"cast": "nvfp4", "rounding": "stochastic"}), make_cast("nvfp4"), CPU
    )
    assert torch.equal(before, torch.get_rng_state())


@needs_gpu
@pytest.mark.parametrize("name", ["fp8", "fp8-row", "fp8-block", "mxfp8", "nvfp4"])
def test_on_this_gpu(name):
    backend = verified_backend(recipe(name), torch.device("cuda", 0))
    assert "self-test" not in backend.reason
