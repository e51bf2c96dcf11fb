"""A checkpoint that an earlier commit wrote continues, bit for bit, to what that commit went on to."""

import pytest

from golden import cells, old_checkpoints
from golden.runs import lines_of, read_kept


@pytest.fixture(scope="module")
def same_arithmetic(pinned):
    """Whether this machine computes as the one did that wrote the checkpoints."""
    (here,) = pinned({"fingerprint": True})
    return here == read_kept("digits")["arithmetic"]


KEPT = read_kept("old_checkpoints")


@pytest.mark.tier("thorough", keep=("msamp-o3",))  # test_golden.py shows the digits of all
@pytest.mark.parametrize("recipe", KEPT)
def test_an_old_checkpoint_is_resumed_to_the_bit(pinned, same_arithmetic, record_property, tmp_path, recipe):
    run = old_checkpoints.extract(recipe, tmp_path)
    now = old_checkpoints.resume(pinned, run, recipe)
    assert [line["step"] for line in lines_of(run / "metrics.jsonl") if line.get("event") == "resume"] == [2]
    if same_arithmetic:
        record_property("golden", "old checkpoints resumed digit for digit")
        differences = list(cells.same(KEPT[recipe], now))
    else:
        record_property("golden", "old checkpoints resumed within bounds")
        bounds = read_kept("bounds")[recipe]
        differences = list(cells.near(KEPT[recipe], now, bounds))
    assert not differences, "\n".join([recipe, *differences])
    assert len(now["loss and grad_norm"]) == 4
