"""Results on meta tensors that are remembered: the layout that torch gives, and separate memory."""

import pytest
import torch

from narrowgauge.trainer.simulate.recorder import Recorder

META = torch.device("meta")


def layouts(function):
    """The layouts of a function's results: by torch, and by the recorder, which remembers the first."""
    with Recorder():
        twice = [function() for _ in range(2)]
    return [(y.shape, y.stride(), y.dtype, y.device) for y in (function(), *twice)]


X = torch.empty(4, 6, dtype=torch.bfloat16, device=META)
I = torch.empty(4, 6, dtype=torch.int32, device=META)  # noqa: E741


@pytest.mark.parametrize(
    "function",
    [
        lambda: X.T.contiguous(),
        lambda: X[:, ::2] * X[:, 1::2],
        lambda: X.expand(3, 4, 6) * 1,
        lambda: X.clone().mul_(2).add_(X),
        lambda: X.clone().unsqueeze_(0),
        lambda: X.clone().resize_(2, 3),
        lambda: torch.empty(4, 6, device=META).set_(torch.empty(4, 6, device=META)),
    ],
)
def test_a_remembered_result_has_the_layout_that_torch_gives(function):
    torch_s, *ours = layouts(function)
    assert ours == [torch_s, torch_s]


def test_whole_numbers_fractions_and_booleans_give_results_of_their_own():
    """1, 1.0 and True are equal, and have one hash, in Python."""
    with Recorder():
        found = [(I * by).dtype for by in (1, 1.0, True, 1, 1.0, True)]
    assert found == [torch.int32, torch.float32, torch.int32] * 2


def test_a_remembered_result_has_memory_of_its_own_and_a_tensor_with_values_gets_them():
    x = torch.zeros(2)
    with Recorder() as recorder:
        results = [X * 3 for _ in range(3)]
        assert recorder.live.alive == 3 * 48
        results.pop()
        assert recorder.live.alive == 2 * 48
        for _ in range(3):
            x.add_(1)
    assert x.tolist() == [3.0, 3.0]


def test_what_shares_memory_is_not_remembered():
    with Recorder() as recorder:
        seen = [torch.ops.aten._unsafe_view(X, [24]), X.view(24), torch.ops.aten._unsafe_view(X, [24])]
        assert recorder.live.alive == 0
        out = torch.empty(4, 6, dtype=torch.bfloat16, device=META)
        for _ in range(2):
            assert torch.add(X, X, out=out) is out
        assert recorder.live.alive == 48
    assert {y.untyped_storage()._cdata for y in seen} == {X.untyped_storage()._cdata}
