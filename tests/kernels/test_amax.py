"""The amax of a tensor is handed from its writer to its reader, and dropped when the tensor changes."""

import pytest
import torch

from narrowgauge.kernels import amax as amax_room
from narrowgauge.kernels.activation import swiglu_and_amax
from narrowgauge.kernels.amax import (
    _NUMBERS,
    amax_of,
    amax_of_gradient,
    begin_amaxes,
    call,
    known_amax,
    new_amax,
    send_back,
)


def test_it_holds_until_the_tensor_is_written_to():
    x, amax = torch.tensor([1.0, -3.0]), torch.tensor(3.0)
    known = known_amax(x, amax)
    assert known.of(x) is amax
    x.mul_(2)
    assert known.of(x) is None
    known = known_amax(x, amax * 2)
    x[0] = 9  # through a view, which counts as well
    assert known.of(x) is None


@pytest.mark.parametrize("begins", [False, True])
def test_every_tensor_has_a_number_of_its_own_that_begins_as_zero(begins):
    """Also beyond what one launch computes, whatever was written to the others."""
    cpu, taken = torch.device("cpu"), []
    for i in range(_NUMBERS + 7):
        if begins and i % 100 == 0:
            begin_amaxes()
        amax = new_amax(cpu)
        assert (amax.ndim, amax.item(), amax.data_ptr() % 16) == (0, 0.0, 0)
        taken.append(amax.fill_(i))
    assert [int(amax) for amax in taken] == list(range(_NUMBERS + 7))


def test_a_number_that_was_made_in_inference_is_one_for_training():
    begin_amaxes()
    with torch.inference_mode():
        new_amax(torch.device("cpu"))
    assert not new_amax(torch.device("cpu")).is_inference()


def test_what_a_graph_records_begins_as_zero_in_each_replay(monkeypatch):
    """It makes each zero itself, and shares none with what is launched before it and after it."""
    cpu = torch.device("cpu")
    before = new_amax(cpu)
    monkeypatch.setattr(amax_room, "_is_recorded", lambda _: True)
    recorded = [new_amax(cpu) for _ in range(2)]
    monkeypatch.undo()
    one, two, *others = (t.untyped_storage().data_ptr() for t in (*recorded, before, new_amax(cpu)))
    assert one != two
    assert others[0] == others[1] not in (one, two)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_replay_finds_the_largest_of_what_it_reads():
    x, stream, graph = torch.full((1, 64), 8.0, device="cuda"), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        swiglu_and_amax(x)  # the kernel is compiled
    with torch.cuda.graph(graph, stream=stream):
        y, known = swiglu_and_amax(x)
    for number in (8.0, 1.0, 2.0):
        x.fill_(number)
        graph.replay()
        assert known.amax == y.max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_not_known_is_read(dtype):
    x = torch.randn(7, 33, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(amax_of(x), x.abs().amax().float())
    x[3, 4] = -torch.inf
    assert amax_of(x) == torch.inf
    x[3, 4] = torch.nan
    assert amax_of(x).isnan()


@pytest.mark.parametrize("is_view", [False, True])
def test_it_holds_for_a_view_of_all_of_it_and_not_for_a_part(is_view):
    x = torch.arange(24.0).clone().view(2, 3, 4) if is_view else torch.arange(24.0).view(2, 3, 4).clone()
    known = known_amax(x, torch.tensor(23.0))
    assert known.of(x.reshape(-1, 4)) == 23
    assert known.of(x.flatten()) == 23
    for other in (
        x[0],
        x[:, :2],
        x.transpose(0, 1),
        x.clone(),
        x[..., :1].expand(2, 3, 4),
        x.view(torch.int32),
    ):
        assert known.of(other) is None
    view = x.view(6, 4)
    view.add_(1)
    assert known.of(x) is None
    assert known.of(view) is None


def test_a_tensor_that_counts_no_versions_has_no_record():
    with torch.inference_mode():
        assert known_amax(torch.ones(3), torch.tensor(1.0)) is None


def test_a_layer_gets_the_record_only_if_it_takes_one():
    x = torch.ones(3)
    known = known_amax(x, torch.tensor(1.0))

    def plain(x):
        return x

    def layer(x, known=None):
        return known

    layer.takes_amax = True
    assert call(plain, x, [known]) is x
    assert call(layer, x, [known]) is known
    assert call(layer, x, [None]) is None
    assert call(layer, x, []) is None


HEARD = []


class Times(torch.autograd.Function):
    """y = 3x; passes on the amax of the gradient that it returns, and keeps that of the one it gets."""

    @staticmethod
    def forward(ctx, x):
        return 3 * x

    @staticmethod
    def backward(ctx, dy):
        HEARD.append(amax_of_gradient(dy))
        dx = 3 * dy
        send_back(dx, dx.abs().amax())
        return dx


def test_autograd_hands_it_on_to_the_next_backward():
    """Through a view of the whole as well, as a linear layer makes of its output."""
    HEARD.clear()
    x = torch.ones(2, 3, requires_grad=True)
    y = Times.apply(Times.apply(Times.apply(x).view(6)))
    y.backward(torch.full((6,), 2.0))
    assert HEARD[0] is None
    assert [float(t) for t in HEARD[1:]] == [6, 18]


def test_autograd_tells_nothing_of_a_sum_of_gradients():
    HEARD.clear()
    x = torch.ones(3, requires_grad=True)
    y = Times.apply(x)
    (Times.apply(y) + Times.apply(y)).backward(torch.ones(3))
    assert HEARD == [None, None, None]
