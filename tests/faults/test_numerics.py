"""E. Numbers that go wrong: skipped, reported, never saved; and state that keeps its bits and its window."""

import math
import random
import secrets

import pytest

from narrowgauge.checkpoint import is_finite, steps
from support.fault_runs import WIDE, assert_same_bits, newest, state
from support.fault_table import LATER, RANKS, case

NAN = {"kind": "gradient", "factor": math.nan}


def bad(steps, ranks, **more):
    """A NaN gradient, on the last rank alone."""
    return NAN | {"steps": list(steps), "rank": ranks - 1} | more


def at(step, name="SIGTERM"):
    """A signal inside a step."""
    return {"kind": "signals", "name": name, "steps": [step]}


EVERY_STEP = {"checkpoint.every": 1, "checkpoint.keep": 4, "training.steps": 12}


def around(runs, out, changes, ranks, faults):
    """The directory of a run that stops after step 8, with the checkpoints of steps 5 to 8."""
    ended = runs.start(runs.words(changes), out, ranks, [*faults, at(8)]).wait()
    assert set(ended.codes) == {75}, ended.err
    assert steps(out / "checkpoints") == [5, 6, 7, 8]
    return out / "checkpoints"


@case("E1", tier="thorough")
@RANKS
@pytest.mark.parametrize("value", [math.nan, pytest.param(math.inf, marks=LATER)])
@pytest.mark.parametrize(
    "recipe", ["fp8", *(pytest.param(r, marks=LATER) for r in ("bf16", "nvfp4", "msamp-o2"))]
)
def test_all_ranks_skip_the_step_in_which_one_has_a_bad_gradient(runs, out, recipe, value, ranks):
    changes = EVERY_STEP | {"recipe.name": recipe} | (WIDE if recipe == "msamp-o2" else {})
    saved = around(runs, out, changes, ranks, [bad([7], ranks, factor=value)])
    before, after = (state(saved / f"step-{step}", "model", "optimizer") for step in (6, 7))
    assert_same_bits(after, before)
    moved = state(saved / "step-8", "model")
    assert any(not moved[name].equal(after[name]) for name in moved), "the next step moves again"
    (skip,) = runs.look(out).events("skip")
    assert skip["step"] == 7
    runs.finish(runs.words(changes), out, ranks)
    assert len(runs.look(out).events("skip")) == 1
    assert all(map(math.isfinite, runs.look(out).column("loss")))


@case("E1", "E6")
@RANKS
def test_a_skipped_step_is_forgotten_by_scales_too(runs, out, ranks):
    """What delayed scaling saw in step 7 never comes into a history: step 8 finds the histories of step 6."""
    changes = EVERY_STEP | {"recipe.name": "fp8-delayed"}
    saved = around(runs, out, changes, ranks, [bad([7], ranks)])
    seven, eight = (state(saved / f"step-{step}", "recipe") for step in (7, 8))
    pending = {name for name in seven if name.endswith(".amax")}
    assert pending
    assert not any(seven[name].any() for name in pending)
    assert_same_bits(*({n: t for n, t in step.items() if n not in pending} for step in (seven, eight)))


@case("E3", tier="thorough")
@RANKS
def test_bad_steps_in_a_row_end_the_run_and_the_last_good_state_stays(runs, out, ranks):
    changes = {"training.steps": 60, "checkpoint.every": 4, "guard.max_skips": 5}
    words, faults = runs.words(changes), [bad(range(10, 61), ranks)]
    for _ in range(2):  # the same line again comes to the same end
        ended = runs.start(words, out, ranks, faults).wait()
        assert set(ended.codes) == {1}
        assert "Traceback" not in ended.err
        assert "in a row" in ended.err
        assert runs.look(out).column("step")[-1] == 15
    assert runs.look(out).status["status"] == "failed"
    for step in steps(out / "checkpoints"):
        assert all(map(is_finite, state(out / "checkpoints" / f"step-{step}").values()))
    good = runs.undisturbed(changes | {"training.steps": 60}, ranks).column("loss")[:9]
    assert runs.look(out).column("loss")[:9] == good


@pytest.mark.tier("thorough")  # ten seconds and more
@case("E4", tier="quick")
@RANKS
def test_one_bad_step_and_two_hundred_good_ones(runs, tmp_path, ranks):
    """The same with two stops between as without."""
    one_skip(runs, tmp_path, ranks, {})


@case("E4")
@RANKS
def test_one_bad_step_does_not_poison_the_window_of_the_guard(runs, tmp_path, ranks):
    one_skip(
        runs, tmp_path, ranks, {"guard.spike": "skip", "guard.spike_window": 64, "guard.spike_factor": 20}
    )


def one_skip(runs, tmp_path, ranks, guard):
    # The guard sees norms, whatever the recipe; bf16's steps take the least.
    changes = {"training.steps": 205, "training.batch_size": 2, "recipe.name": "bf16"}
    changes |= {"validation.every": 1000} | guard
    words, fault = runs.words(changes | {"checkpoint.every": 100}), bad([5], ranks)
    runs.finish(words, tmp_path / "straight", ranks, faults=[fault])
    for stop in (6, 70):
        ended = runs.start(words, tmp_path / "stopped", ranks, [fault, at(stop)]).wait()
        assert set(ended.codes) == {75}, ended.err
    runs.finish(words, tmp_path / "stopped", ranks, faults=[fault])
    for name in ("straight", "stopped"):
        assert [skip["step"] for skip in runs.look(tmp_path / name).events("skip")] == [5]
    assert runs.look(tmp_path / "stopped").trajectory == runs.look(tmp_path / "straight").trajectory


SPIKE = {"training.steps": 60, "guard.spike_window": 16, "validation.every": 1000}


RAISE = {
    "recipe.name": "fp8-delayed",
    "training.steps": 44,
    "optimizer.lr": 0.01,
    "checkpoint.every": 4,
    "checkpoint.keep": 20,
    "validation.every": 1000,
    "gauges.every": 1000,
    "guard.spike": "raise",
    "guard.spike_window": 12,
    "guard.spike_factor": 3,
}


def surprise(tmp_path, name):
    """In step 40 the model is very wrong about the sequences it meets there, whichever way it comes."""
    return {"kind": "output", "steps": [40], "factor": 30.0, "data": str(tmp_path / f"{name}.ids")}


@case("E5")
@RANKS
@pytest.mark.parametrize("policy", ["warn", "skip", "rollback"])
def test_a_spike_is_answered_as_configured_and_alike_after_a_resume(runs, tmp_path, policy, ranks):
    words = runs.words(SPIKE | {"guard.spike": policy})
    runs.finish(words, tmp_path / "straight", ranks, faults=[surprise(tmp_path, "straight")])
    for step in (39, 40, 41, 43):  # killed around it, and asked to stop inside it
        job = runs.start(words, tmp_path / "killed", ranks, [surprise(tmp_path, "killed")])
        job.until(runs.look(tmp_path / "killed").has_step(step)).kill()
    faults = [surprise(tmp_path, "killed"), at(50)]
    runs.start(words, tmp_path / "killed", ranks, faults).wait()
    runs.finish(words, tmp_path / "killed", ranks, faults=[surprise(tmp_path, "killed")])
    straight, killed = (runs.look(tmp_path / name) for name in ("straight", "killed"))
    kind = {"warn": "spike", "skip": "skip", "rollback": "rollback"}[policy]
    for look in (straight, killed):
        (event,) = look.events(kind)
        assert event.get("from_step", event["step"]) == 40
        assert look.status["status"] == "done"
        assert all(map(math.isfinite, look.column("loss")))
    assert killed.trajectory == straight.trajectory
    if policy == "rollback":
        first, end = straight.events("rollback")[0]["skipped_samples"]
        assert first < end, "the data are skipped, too"
        assert max(straight.column("loss")[39:]) < 2 * min(straight.column("loss")[30:39])


@case("E5", tier="thorough")
@RANKS
def test_a_step_that_is_skipped_for_its_spike_leaves_no_trace(runs, out, ranks):
    changes = SPIKE | {"guard.spike": "skip", "checkpoint.every": 1, "checkpoint.keep": 4}
    faults = [{"kind": "output", "steps": [40], "factor": 30.0}, at(41)]
    assert set(runs.start(runs.words(changes), out, ranks, faults).wait().codes) == {75}
    before, after = (state(out / "checkpoints" / f"step-{n}", "model", "optimizer") for n in (39, 40))
    assert_same_bits(after, before)


@case("E5", "E6")
@RANKS
def test_a_raise_is_the_same_after_kills_around_it(runs, tmp_path, ranks):
    """Delayed scales that inputs outgrow in step 27: killed at random steps around it."""
    seed = secrets.randbits(32)
    print(f"steps from random.Random({seed})")
    rng, words = random.Random(seed), runs.words(RAISE)
    outgrow = {"kind": "outgrow", "first": 27}
    runs.finish(words, tmp_path / "straight", ranks, faults=[outgrow])
    straight, killed = (runs.look(tmp_path / name) for name in ("straight", "killed"))
    assert "fprop.x" in [event["place"] for event in straight.events("raise")]
    for step in sorted(rng.randint(24, 38) for _ in range(4)):
        runs.start(words, killed.path, ranks, [outgrow]).until(killed.has_step(step)).kill()
    runs.finish(words, killed.path, ranks, faults=[outgrow])
    assert killed.trajectory == straight.trajectory
    assert killed.events("raise") == straight.events("raise")
    assert (killed.path / "recipe.toml").read_text() == (straight.path / "recipe.toml").read_text()


@case("E8", tier="thorough")
@pytest.mark.parametrize("ranks", [2], ids=["2 ranks"])
def test_a_bit_that_flips_in_one_replica_is_found_before_the_next_save(runs, out, ranks):
    changes = {"checkpoint.every": 4, "guard.check_every": 3, "training.batch_size": 4}
    words = [*runs.words(changes), "--parallel.replicate", "2"]
    ended = runs.start(words, out, ranks, [{"kind": "flip", "steps": [6], "rank": 1}]).wait()
    assert set(ended.codes) == {1}
    assert "blocks.0.down" in ended.err
    assert "rank" in ended.err
    assert newest(out).name == "step-4"
    assert runs.look(out).status["status"] == "failed"


@case("E8")
@RANKS
def test_a_bit_that_flips_on_the_way_is_found_by_replay(runs, out, ranks):
    words = runs.words({"checkpoint.every": 4, "guard.replay_every": 1})
    flip = {"kind": "flip", "what": "activation", "steps": [6], "rank": ranks - 1}
    ended = runs.start(words, out, ranks, [flip]).wait()
    assert set(ended.codes) == {1}
    assert "Traceback" not in ended.err
    assert newest(out).name == "step-4"


@case("E9")
@RANKS
def test_uneven_documents_weigh_the_same_however_they_are_divided(runs, tmp_path, ranks):
    """Accumulation of 1 against 4, one rank against several: each target counts once."""
    changes = {"recipe.name": "fp32", "data.separate_documents": True, "training.batch_size": 8}
    lines = []
    for micro, count in ((1, 1), (4, 1), (1, ranks), (4, ranks)):
        made = runs.undisturbed(changes | {"training.micro_batch_size": micro}, count)
        lines.append([(line["loss"], line["grad_norm"]) for line in made.steps[:10]])
    for other in lines[1:]:
        for mine, theirs in zip(lines[0], other, strict=True):
            assert theirs == pytest.approx(mine, rel=1e-6)
