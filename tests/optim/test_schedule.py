"""The learning rate at its ends and in between."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowgauge.optim import decay_start, learning_rate

LR = 3e-4
KINDS = ("cosine", "linear", "wsd", "constant")


def rates(kind, steps=100, warmup=10, final=0.1, decay=0.2):
    how = {"lr": LR, "steps": steps, "kind": kind, "warmup_steps": warmup}
    how |= {"final_lr_fraction": final, "decay_fraction": decay}
    return [learning_rate(step, **how) for step in range(1, steps + 1)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_ends(kind):
    r = rates(kind)
    assert r[0] == pytest.approx(LR / 10)
    assert r[9] == LR
    assert r[-1] == pytest.approx(LR if kind == "constant" else LR / 10)


@pytest.mark.parametrize("kind", KINDS)
def test_the_decay_starts_with_the_first_rate_below_the_peak(kind):
    r = rates(kind)
    below = [step for step, rate in enumerate(r, start=1) if step > 10 and rate < LR]
    start = decay_start(steps=100, kind=kind, warmup_steps=10, decay_fraction=0.2)
    assert start == (below[0] if below else None)
    assert kind == "constant" or start == (81 if kind == "wsd" else 11)


def test_a_decay_longer_than_the_run_begins_after_warm_up_and_none_is_constant():
    assert rates("wsd", decay=1.0) == rates("linear")
    assert rates("wsd", decay=0.0) == rates("constant")


@given(
    kind=st.sampled_from(KINDS),
    steps=st.integers(1, 300),
    warmup=st.integers(0, 300),
    final=st.floats(0, 1),
    decay=st.floats(0, 1),
)
def test_rises_to_the_peak_then_falls_without_a_jump(kind, steps, warmup, final, decay):
    r = rates(kind, steps, warmup, final, decay)
    top = min(warmup, steps)
    assert r[:top] == sorted(r[:top])
    assert r[top:] == sorted(r[top:], reverse=True)
    assert max(r) <= LR
    assert min(r[top:], default=LR) >= LR * (final - 1e-12)
    # No step is steeper than a cosine over the shortest stretch there is.
    fall = round(steps * decay) if kind == "wsd" else steps
    stretch = max(1, min(steps - top, fall))
    steepest = max(LR / max(warmup, 1), math.pi / 2 * LR * (1 - final) / stretch)
    jumps = [abs(b - a) for a, b in itertools.pairwise(r)]
    assert all(j <= steepest + LR * 1e-12 for j in jumps)
