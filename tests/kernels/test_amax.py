"""The amax of a tensor is handed from its writer to its reader, and dropped when the tensor changes."""

import pytest
import torch

from narrowgauge.kernels import amax as amax_room
from narrowgauge.kernels.amax import _ZEROS_PER_LAUNCH, attach_amax, begin_amaxes, new_amax
from narrowgauge.kernels.cast import attached_amax

CPU = torch.device("cpu")


@pytest.mark.parametrize("begins", [False, True])
def test_every_tensor_has_a_number_of_its_own_that_begins_as_zero(begins):
    """Also beyond what one launch computes, whatever was written to the others."""
    taken = []
    for i in range(_ZEROS_PER_LAUNCH + 7):
        if begins and i % 100 == 0:
            begin_amaxes()
        amax = new_amax(CPU)
        assert (amax.ndim, amax.item(), amax.data_ptr() % 16) == (0, 0.0, 0)
        taken.append(amax.fill_(i))
    assert [int(amax) for amax in taken] == list(range(_ZEROS_PER_LAUNCH + 7))


def test_a_number_that_was_made_in_inference_is_one_for_training():
    begin_amaxes()
    with torch.inference_mode():
        new_amax(CPU)
        attach_amax(x := torch.ones(3), torch.tensor(1.0))
        assert attached_amax(x) is None, "such a tensor counts no versions"
    assert not new_amax(CPU).is_inference()


def test_what_a_graph_records_begins_as_zero_in_each_replay(monkeypatch):
    """It makes each zero itself, and shares none with what is launched before it and after it."""
    before = new_amax(CPU)
    monkeypatch.setattr(amax_room, "_is_recorded", lambda _: True)
    recorded = [new_amax(CPU) for _ in range(2)]
    monkeypatch.undo()
    one, two, *others = (t.untyped_storage().data_ptr() for t in (*recorded, before, new_amax(CPU)))
    assert one != two
    assert others[0] == others[1] not in (one, two)


def test_it_holds_for_a_view_of_all_of_it_until_that_is_written_to_and_not_for_a_part():
    x = torch.arange(24.0).view(2, 3, 4).clone()
    attach_amax(x, torch.tensor(23.0))
    whole, part = x.view(6, 4), x[0]
    for same in (x, whole, x.flatten()):
        assert attached_amax(same) == 23
    others = part, x[:, :2], x.transpose(0, 1), x.clone(), x[..., :1].expand(2, 3, 4), x.view(torch.int32)
    for other in others:
        assert attached_amax(other) is None
    for write in (x, whole, part):
        attach_amax(x, torch.tensor(23.0))
        write.mul_(2)
        assert attached_amax(x) is None
        assert attached_amax(whole) is None


HEARD = []


class Times(torch.autograd.Function):
    """y = 3x; passes on the amax of the gradient that it returns, and keeps that of the one it gets."""

    @staticmethod
    def forward(ctx, x):
        return 3 * x

    @staticmethod
    def backward(ctx, dy):
        HEARD.append(attached_amax(dy))
        dx = 3 * dy
        attach_amax(dx, dx.abs().amax())
        return dx


def test_autograd_hands_it_on_to_the_next_backward_and_tells_nothing_of_a_sum():
    """Through a view of the whole as well, as a linear layer makes of its output."""
    HEARD.clear()
    x = torch.ones(2, 3, requires_grad=True)
    y = Times.apply(Times.apply(Times.apply(x).view(6)))
    y.backward(torch.full((6,), 2.0))
    assert HEARD[0] is None
    assert [float(t) for t in HEARD[1:]] == [6, 18]
    HEARD.clear()
    y = Times.apply(x)
    (Times.apply(y) + Times.apply(y)).sum().backward()
    assert HEARD == [None, None, None]
