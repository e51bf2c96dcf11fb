"""Every kernel is its twin in plain torch: the table of tests/gpu, of strange numbers and odd shapes.

tests/gpu/test_kernels.py has ordinary numbers. The other files of this folder compare what no operation of
the table does, and with other oracles.
"""

from functools import partial

import pytest
import torch

from gpu import joined_operations, operations
from gpu.compare import close, same
from gpu.operations import matrix_cast
from gpu.table import OPERATIONS
from kernels.common import assert_same
from narrowgauge.quantization import make_cast
from narrowgauge.quantization.state import quantized_state
from support.interpreted import plain_operations


def not_finite(x, seed):
    words = torch.tensor([torch.nan, torch.inf, -torch.inf])
    x.view(-1)[[3 + 7 * seed, x.numel() // 2 + seed, -1 - seed]] = words
    return x


#: What becomes of the numbers that an operation draws.
STRANGE = {
    "not finite": not_finite,
    "zeros": lambda x, _: x * 0.0,
    "subnormal": lambda x, _: x * 2.0**-130,
    "huge": lambda x, _: x.sign() * 3.3e38,
    "ties": lambda x, _: (x * 64).round() / 32,
}


@pytest.fixture
def draw(monkeypatch):
    """`draw(kind)` makes all operations draw strange numbers."""
    right = operations.drawn

    def change(kind):
        def drawn(shape, seed, device, dtype=torch.bfloat16):
            usual = right(shape, seed, torch.device("cpu"), torch.float32)
            return STRANGE[kind](usual, seed).to(dtype).to(device)

        for module in (operations, joined_operations):
            monkeypatch.setattr(module, "drawn", drawn)

    return change


def require_same(run, device):
    """Every bit; where a scale is NaN, the numbers under it are of no matter."""
    got = run(device)
    with plain_operations():
        expected = run(device)
    if (factor := expected.get("factor")) is not None and not factor.isfinite().all():
        got, expected = ({k: v for k, v in found.items() if k != "values"} for found in (got, expected))
    same(got, expected)


SAME = [n for n, o in OPERATIONS.items() if o.compare is same and len(o.small) == 2]
#: Of each kind of scale, layout and operation one.
KINDS = (
    *("e4m3 along axis -1", "fp8-row along axis 0", "fp8-1x128 along axis -1", "fp8-128x128 along axis 0"),
    *("mxfp8 along axis -1", "mxfp4 along axis 0", "nvfp4 along axis -1", "nvfp4-2d along axis 0"),
    *("fp4-row along axis -1", "nvfp4 with random bits and a transform along axis 0"),
    *("e4m3 along both axes, scale known", "nvfp4 as the hardware reads it, along axis -1"),
    *("scales of a product", "codes along the other axis", "casts before a gather"),
    *("AdamW on msamp-o3's state", "AdamW on bf16-sr's state", "AdamW on 16 bits", "gradients added in FP8"),
)


@pytest.mark.tier("thorough", keep=("fp8-row along axis 0", "scales of a product"), nightly=KINDS)
@pytest.mark.parametrize("name", SAME)
def test_a_kernel_is_its_twin_on_strange_numbers_and_shapes(name, device, draw):
    """Along axis 0 a kernel reads other addresses and computes the same."""
    run = OPERATIONS[name].run
    for shape in ((1, 2), (131, 34)):
        require_same(partial(run, shape=shape), device)
    for kind in STRANGE if "axis 0" not in name else ("not finite", "zeros"):
        if (name, kind) != ("casts before a gather", "not finite"):  # whose codes would be of no matter
            draw(kind)
            require_same(partial(run, shape=(40, 72)), device)


@pytest.mark.parametrize("name", ["AdamW on msamp-o3's state", "gradients added in FP8"])
def test_state_in_the_memory_of_the_host_is_changed_in_copies(name, device, monkeypatch):
    """As on a GPU, whose memory is another one."""
    run = partial(OPERATIONS[name].run, device, (8, 48))
    expected = run()
    monkeypatch.setattr(quantized_state, "is_gpu", lambda _: True)
    for kind in ("QuantizedState", "GradientState"):
        monkeypatch.setattr(operations, kind, partial(getattr(operations, kind), on_host=True))
    same(run(), expected)


#: Free keys of casts, everything else that scales allow, and ways to round.
CASTS = {
    "fp4 ue5m3": {"element": "e2m1", "block": 16, "scale": "e5m3"},
    "int4 bf16 of 32x32": {"element": "int4", "block": [32, 32], "scale": "bf16"},
    "e1m2 e4m3 alone": {"element": "e1m2", "block": 64, "scale": "e4m3"},
    "e4m3 ue5m3 a row": {"element": "e4m3", "block": "row", "scale": "e5m3"},
    "mxfp8 of 128x128": {"element": "e4m3", "block": [128, 128], "scale": "e8m0"},
    "int4 under a tensor scale": {"element": "int4", "block": 16, "scale": "e4m3", "tensor_scale": "tensor"},
    **{f"mxfp4 {rule}": {"cast": "mxfp4", "scale_rule": rule} for rule in ("floor", "ceil")},
    "nvfp4 headroom": {"cast": "nvfp4", "headroom": 16 / 17},
    "fp4-row powers of two": {"cast": "fp4-row", "power_of_two": True},
    **{
        f"{name} {rounding}": {"cast": name, "rounding": rounding}
        for name in ("e5m2", "e4m3fnuz", "mxint8", "nvfp4", "fp4-row")
        for rounding in ("stochastic", "half-away", "toward-zero")
    },
}


@pytest.mark.tier("thorough", keep=("fp4 ue5m3", "e4m3fnuz half-away", "mxfp4 ceil"))
@pytest.mark.parametrize("name", CASTS)
def test_a_cast_is_its_twin_under_every_key(name, device, draw):
    run = partial(matrix_cast, make_cast(CASTS[name]))
    require_same(partial(run, 0, shape=(40, 72)), device)
    for kind in STRANGE:
        draw(kind)
        require_same(partial(run, -1, shape=(40, 72)), device)


# A row with such a weight has no slopes in the kernel (`test_product`).
LEFT_OUT = ("attention", "FP4 matmul with separate outliers")
NEAR = [n for n, o in OPERATIONS.items() if o.compare is not same and n not in LEFT_OUT]


@pytest.mark.tier("thorough", keep=("RMSNorm", "heads with bias and positions"))
@pytest.mark.parametrize("name", NEAR)
def test_what_is_not_finite_is_so_in_the_twin(name, device, draw):
    """NaN and infinities are in the same places, and the other numbers near."""
    operation = OPERATIONS[name]
    for kind in ("not finite", "zeros"):
        draw(kind)
        got = operation.run(device, operation.small)
        with plain_operations():
            expected = operation.reference(device, operation.small)
        for key, b in expected.items():
            a, is_finite = got[key].cpu(), b.cpu().isfinite()
            assert_same([a.isfinite(), a[~is_finite]], [is_finite, b.cpu()[~is_finite]])
            close({key: a[is_finite]}, {key: b.cpu()[is_finite]}, share=0.02)
