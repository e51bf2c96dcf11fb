"""A gradient that is added to by the kernel has the codes, the scale and the factor of the reference."""

import pytest
import torch

from kernels.common import INF, NAN, assert_same, normal
from narrowgauge.formats import RandomStream, stream_key
from narrowgauge.kernels.gradient_sum import add_gradient
from narrowgauge.quantization import GradientState, make_cast
from narrowgauge.quantization.state import quantized_state

RANDOM = {"power_of_two": True, "rounding": "stochastic"}
WAYS = {
    "msamp": {"cast": "e4m3", "prescale": True} | RANDOM,
    "without a factor": {"cast": "e4m3"} | RANDOM,
    "e5m2 to nearest": {"cast": "e5m2", "prescale": True},
}


def two(shape, device, way="msamp"):
    return (GradientState(torch.Size(shape), make_cast(WAYS[way]), device) for _ in range(2))


def stream(step, device, offset):
    return RandomStream(torch.tensor(stream_key(7, step, 3), dtype=torch.int32, device=device), offset)


def bits(state):
    factors = {} if state.prescale is None else state.prescale.tensors
    views = {1: torch.uint8, 4: torch.int32}
    return {n: t.clone().view(views[t.element_size()]) for n, t in (state.tensors | factors).items()}


@pytest.mark.tier("thorough", keep=(torch.bfloat16, ("dtype1", "msamp")))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_is_its_reference(way, dtype, device):
    """Two steps of three micro-batches: an empty gradient, sums, and the next step's factor.

    The shape fills two programs of the first launch and five of the second, none of them to the end.
    """
    cast, shape = make_cast(WAYS[way]), (71, 137)
    ours, plain = two(shape, device, way)
    for step in (1, 2):
        for micro in range(3):
            dw = normal(*shape, seed=3 * step + micro) * 10.0**-micro
            dw[:, ::9] *= 2.0**-14
            dw = dw.to(dtype).to(device)
            dw = dw if micro != 1 else dw.T.contiguous().T  # as that of a transposed layer
            offset = 5000 * micro if micro != 2 else torch.tensor(2**32 - 3000, device=device)
            random = stream(step, device, offset) if cast.is_random else None
            add_gradient(ours, dw, random)
            plain.add(dw.float(), random)
            for name, found in bits(ours).items():
                assert torch.equal(found, bits(plain)[name]), (step, micro, name)
            assert (ours.sums, ours.is_empty) == (plain.sums, plain.is_empty)
        for state in (ours, plain):
            if cast.prescale:  # a factor that makes elements overflow: the next step's is another
                state.prescale.tensors["mu"].fill_(2.5)
            state.is_empty = True
    if cast.prescale:
        ours.prescale.end_step()
        assert ours.prescale.tensors["mu"] == 1.25, "too much overflowed"


def test_in_the_memory_of_the_host_it_is_added_to_in_a_copy(device, monkeypatch):
    """As on a GPU, whose memory is another one."""
    cast = make_cast(WAYS["msamp"])
    here, there = (GradientState(torch.Size((5, 16)), cast, device, on_host) for on_host in (False, True))
    addresses = [t.data_ptr() for t in there.tensors.values()]
    monkeypatch.setattr(quantized_state, "is_gpu", lambda _: True)
    for micro in range(2):
        dw = normal(5, 16, seed=micro).to(device)
        for gradient in (here, there):
            add_gradient(gradient, dw, stream(1, device, micro))
        assert all(torch.equal(found, bits(there)[name].to(device)) for name, found in bits(here).items())
    assert [t.data_ptr() for t in there.tensors.values()] == addresses


def test_what_is_not_finite_stays_so(device):
    for bad in (NAN, INF, -INF):
        ours, plain = two((5, 16), device)
        for value in (1.0, bad, 1.0):
            dw = torch.ones(5, 16, device=device)
            dw[2, 3] = value
            add_gradient(ours, dw, stream(1, device, 0))
            plain.add(dw, stream(1, device, 0))
        assert ours.read().isnan().all()
        assert plain.read().isnan().all()
        assert_same(ours.prescale.tensors.values(), plain.prescale.tensors.values())
