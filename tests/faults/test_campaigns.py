"""A1. SIGKILL at any moment, the same line again: every digit is that of the undisturbed run."""

import random
import secrets
import time
from functools import partial

import pytest

from narrowgauge.checkpoint import steps
from narrowgauge.recipes import recipe_names
from support.fault_runs import WIDE
from support.fault_table import RANKS, case


def campaign(runs, tmp_path, changes, ranks, wanted):
    """Kill runs until `wanted` kills are done; each run that comes to its end must be the undisturbed one."""
    seed = secrets.randbits(32)
    print(f"delays from random.Random({seed})")
    rng, words = random.Random(seed), runs.words(changes)
    expected, longest = runs.undisturbed(changes, ranks).trajectory, runs.seconds(changes, ranks)
    kills = number = 0
    while kills < wanted:
        out = tmp_path / f"killed-{number}"
        kills += kill_until_done(partial(runs.start, words, out, ranks), rng, longest, wanted - kills)
        assert runs.look(out).trajectory == expected
        assert runs.look(out).status["status"] == "done"
        assert len(runs.look(out).events("done")) == 1
        number += 1


def kill_until_done(start, rng, longest, most):
    """The same job again and again, killed after a random time at most `most` times; the number of kills."""
    for kills in range(most):
        job = start()
        time.sleep(rng.uniform(0, longest))
        ended = job.kill()
        assert "Traceback" not in ended.err
        if set(ended.codes) == {0}:
            return kills
    ended = start().wait()
    assert set(ended.codes) == {0}, ended.err
    return most


@pytest.mark.tier("thorough")  # ten seconds and more
@case("A1", "E6", tier="quick")
def test_kills_leave_no_trace(runs, tmp_path):
    campaign(runs, tmp_path, {"recipe.name": "nvfp4", "training.steps": 8}, 1, 3)


@case("A1", "E6")
@RANKS
@pytest.mark.parametrize("name", ["bf16", "fp8-delayed", "mxfp8", "nvfp4", "msamp-o2"])
def test_fifty_kills_leave_no_trace(runs, tmp_path, name, ranks):
    wide = WIDE if name == "msamp-o2" else {}
    campaign(runs, tmp_path, wide | {"recipe.name": name}, ranks, 50)


@case("E6")
@pytest.mark.parametrize("name", ["fp16", "fp8", "mxfp4", "quartet"])
def test_kills_under_other_recipes_leave_no_trace(runs, tmp_path, name):
    campaign(runs, tmp_path, {"recipe.name": name}, 1, 10)


# The second half of the steps is the schedule's fall, from which on `nvfp4-finish` has other casts.
SHORT = {"training.steps": 12, "checkpoint.every": 3, "schedule.kind": "wsd", "schedule.decay_fraction": 0.5}


@case("E6", "E7")
@pytest.mark.parametrize("name", recipe_names())
def test_kills_at_any_two_steps_of_any_recipe_leave_no_trace(runs, out, name):
    """SIGKILL after two steps, drawn again each time; all losses and all bytes of the state are the same."""
    changes, drawn = WIDE | SHORT | {"recipe.name": name}, sorted(random.sample(range(1, 11), 2))
    print(f"killed after steps {drawn}")
    words, look, resumes = runs.words(changes), runs.look(out), 0
    for step in drawn:
        resumes += bool(steps(out / "checkpoints"))
        ended = runs.start(words, out).until(look.has_step(step, resumes)).kill()
        assert ended.codes == [-9], ended.err
    runs.finish(words, out)
    assert look.trajectory == runs.undisturbed(changes).trajectory
    assert look.status["status"] == "done"


@case("E6", "E7")
@pytest.mark.parametrize("name", ["bf16-sr", "msamp-o1", "msamp-o3", "coat", "muon"])
def test_kills_leave_narrow_state_as_it_was(runs, tmp_path, name):
    named = {"recipe.name": name} if name != "muon" else {"recipe.name": "msamp-o3", "optimizer.name": "muon"}
    campaign(runs, tmp_path, WIDE | named, 1, 10)


@case("E6")
@pytest.mark.parametrize(
    "changes",
    [
        {"model.name": "gpt2-debug", "model.kv_heads": 4},
        {"training.recompute": True, "training.micro_batch_size": 2},
        {"recipe.fprop.x": "{cast = 'mxfp4', rounding = 'stochastic'}"},
    ],
    ids=["tied head", "recompute", "stochastic forward"],
)
def test_kills_of_other_runs_leave_no_trace(runs, tmp_path, changes):
    if "recipe.fprop.x" in changes:
        recipe = tmp_path / "mine.toml"
        recipe.write_text(f"[fprop]\nx = {changes['recipe.fprop.x']}\n[dgrad]\ndy = 'nvfp4'\n")
        changes = {"recipe.name": recipe}
    campaign(runs, tmp_path, changes, 1, 5)
