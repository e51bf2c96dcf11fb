"""E. Numbers that go wrong: skipped, reported, never saved; and state that keeps its bits and its window."""

import math
import random
import secrets

import pytest

from narrowgauge.trainer.checkpoint import steps
from support.fault_runs import WIDE, assert_same_bits, newest, state, stop_in
from support.fault_table import LATER, RANKS, case


def bad(steps, ranks, factor=math.nan):
    """A gradient that is no number, on the last rank alone."""
    return {"kind": "gradient", "factor": factor, "steps": list(steps), "rank": ranks - 1}


EVERY_STEP = {"checkpoint.every": 1, "checkpoint.keep": 4}
SKIPS = [
    ("fp8", math.nan),
    *(pytest.param(recipe, math.nan, marks=LATER) for recipe in ("bf16", "nvfp4", "fp8-delayed")),
    pytest.param("msamp-o2", math.inf, marks=LATER),
]


@case("E1", "E4", "E6", tier="thorough")
@RANKS
@pytest.mark.parametrize(("recipe", "value"), SKIPS)
def test_all_ranks_skip_the_step_in_which_one_has_a_bad_gradient(runs, out, recipe, value, ranks):
    """Nothing moves in it, and the run with its stop goes on as one that was never stopped."""
    changes = EVERY_STEP | {"recipe.name": recipe} | (WIDE if recipe == "msamp-o2" else {})
    fault = bad([7], ranks, value)
    ended = runs.start(runs.words(changes), out, ranks, [fault, stop_in(8)]).wait()
    assert set(ended.codes) == {75}, ended.err
    saved = out / "checkpoints"
    assert steps(saved) == [5, 6, 7, 8]
    before, after = (state(saved / f"step-{step}", "model", "optimizer") for step in (6, 7))
    assert_same_bits(after, before)
    moved = state(saved / "step-8", "model")
    assert any(not moved[name].equal(after[name]) for name in moved), "the next step moves again"
    if recipe == "fp8-delayed":  # what step 7 saw never comes into a history: step 8 finds those of step 6
        seven, eight = (state(saved / f"step-{step}", "recipe") for step in (7, 8))
        pending = {name for name in seven if name.endswith(".amax")}
        assert pending
        assert not any(seven[name].any() for name in pending)
        assert_same_bits(*({n: t for n, t in step.items() if n not in pending} for step in (seven, eight)))
    runs.finish(runs.words(changes), out, ranks, faults=[fault])
    runs.finish(runs.words(changes), out.with_name("straight"), ranks, faults=[fault])
    straight = runs.look(out.with_name("straight"))
    assert runs.look(out).trajectory == straight.trajectory
    assert [skip["step"] for skip in straight.events("skip")] == [7]
    assert all(map(math.isfinite, straight.column("loss")))


SPIKE = {"training.steps": 60, "guard.spike_window": 16, "validation.every": 1000}
# In step 40 the model is very wrong about the sequences it meets there.
SURPRISE = {"kind": "output", "steps": [40], "factor": 30.0}


@case("E5", tier="thorough")
@RANKS
def test_a_step_that_is_skipped_for_its_spike_leaves_no_trace(runs, out, ranks):
    changes = SPIKE | EVERY_STEP | {"guard.spike": "skip"}
    assert set(runs.start(runs.words(changes), out, ranks, [SURPRISE, stop_in(41)]).wait().codes) == {75}
    before, after = (state(out / "checkpoints" / f"step-{n}", "model", "optimizer") for n in (39, 40))
    assert_same_bits(after, before)


RAISE = {"recipe.name": "fp8-delayed", "training.steps": 44, "optimizer.lr": 0.01, "validation.every": 1000}
RAISE |= {"checkpoint.every": 4, "checkpoint.keep": 20, "gauges.every": 1000}
RAISE |= {"guard.spike": "raise", "guard.spike_window": 12, "guard.spike_factor": 3}


@case("E5", "E6")
@RANKS
def test_a_raise_is_the_same_after_kills_around_it(runs, tmp_path, ranks):
    """Delayed scales that inputs outgrow in step 27: killed at random steps around it."""
    seed = secrets.randbits(32)
    print(f"steps from random.Random({seed})")
    rng, words, outgrow = random.Random(seed), runs.words(RAISE), {"kind": "outgrow", "first": 27}
    runs.finish(words, tmp_path / "straight", ranks, faults=[outgrow])
    straight, killed = (runs.look(tmp_path / name) for name in ("straight", "killed"))
    assert "fprop.x" in [event["place"] for event in straight.events("raise")]
    for step in sorted(rng.randint(24, 38) for _ in range(4)):
        runs.start(words, killed.path, ranks, [outgrow]).until(killed.has_step(step)).kill()
    runs.finish(words, killed.path, ranks, faults=[outgrow])
    assert killed.trajectory == straight.trajectory
    assert killed.events("raise") == straight.events("raise")
    assert (killed.path / "recipe.toml").read_text() == (straight.path / "recipe.toml").read_text()


REPLICAS = {"guard.check_every": 3, "training.batch_size": 4, "parallel.replicate": 2, "checkpoint.every": 4}


@case("E8", tier="thorough")
def test_a_bit_that_flips_in_one_replica_is_found_before_the_next_save(runs, out):
    flip = {"kind": "flip", "steps": [6], "rank": 1}
    ended = runs.start(runs.words(REPLICAS), out, 2, [flip]).wait()
    assert set(ended.codes) == {1}
    assert "blocks.0.down" in ended.err
    assert "rank" in ended.err
    assert newest(out).name == "step-4"
    assert runs.look(out).status["status"] == "failed"
