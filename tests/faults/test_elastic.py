"""B. Another number of ranks, another mesh: the same state to the bit, the same tokens, the same losses."""

import math

import pytest

from support.fault_runs import assert_same_bits, newest, state
from support.fault_table import LATER, case

# 12 sequences a step: 1, 2, 3 and 4 ranks have as many each.
BATCH = {"training.batch_size": 12, "training.micro_batch_size": 1, "checkpoint.every": 1000}
WIDE = {"model.dim": 128, "model.ffn_dim": 256}  # for narrow moments
ODD = {"model.dim": 40, "model.heads": 4, "model.kv_heads": 2, "model.ffn_dim": 56}

MOVED = ("model", "optimizer")  # groups of tensors: weights, masters, moments and their scales


def stand_still(runs, words, out, ranks, step):
    """One step in which nothing may move, its gradient being no number, and a save by SIGTERM."""
    spoil = {"kind": "gradient", "factor": math.nan, "steps": [step]}
    ended = runs.start(
        words, out, ranks, [spoil, {"kind": "signals", "name": "SIGTERM", "steps": [step]}]
    ).wait()
    assert set(ended.codes) == {75}, ended.err
    assert newest(out).name == f"step-{step}"


def goes_through(runs, out, changes, meshes):
    """A run trains 8 steps on the first mesh, then stands still on each of the others and again on the first;
    (ranks, more words) is a mesh."""
    words, (ranks, mesh) = runs.words(changes), meshes[0]
    stop = {"kind": "signals", "name": "SIGTERM", "steps": [8]}
    ended = runs.start([*words, *mesh], out, ranks, [stop]).wait()
    assert set(ended.codes) == {75}, ended.err
    before = state(newest(out), *MOVED)
    for step, (ranks, mesh) in enumerate([*meshes[1:], meshes[0]], start=9):
        stand_still(runs, [*words, *mesh], out, ranks, step)
        assert_same_bits(state(newest(out), *MOVED), before)


@pytest.mark.tier("thorough")  # ten seconds and more
@case("B1", tier="quick")
@pytest.mark.parametrize(
    "recipe", ["nvfp4", *(pytest.param(r, marks=LATER) for r in ("bf16", "mxfp8", "msamp-o2"))]
)
@pytest.mark.parametrize("ranks", [2], ids=["2 ranks"])
def test_the_state_is_the_same_bits_on_any_number_of_ranks(runs, out, recipe, ranks):
    changes = BATCH | {"recipe.name": recipe} | (WIDE if recipe == "msamp-o2" else {})
    counts = (ranks, 1) if recipe == "nvfp4" else (ranks, 1, 3, 4)
    goes_through(runs, out, changes, [(count, ()) for count in counts])


def goes_on_alike(runs, tmp_path, changes, ranks, to, relative, mesh=(), other=()):
    """Begun on `ranks`, continued on `to`: the tokens match the run on one mesh, the losses nearly."""
    words, tokens, losses = runs.words(changes), {}, {}
    for name, plan in (
        ("undisturbed", [(ranks, mesh, None)]),
        ("moved", [(ranks, mesh, 10), (to, other, None)]),
    ):
        out, file = tmp_path / name, tmp_path / f"{name}.tokens"
        for count, parallel, stop in plan:
            faults = [{"kind": "record_tokens", "file": str(file)}]
            faults += [{"kind": "signals", "name": "SIGTERM", "steps": [stop]}] if stop else []
            ended = runs.start([*words, *parallel], out, count, faults).wait()
            assert set(ended.codes) == {75 if stop else 0}, ended.err
        tokens[name] = sorted(set(file.read_text().splitlines()))
        losses[name] = runs.look(out).column("loss")
    assert tokens["moved"] == tokens["undisturbed"]
    assert losses["moved"] == pytest.approx(losses["undisturbed"], rel=relative)


@case("B1")
@pytest.mark.parametrize("ranks", [2], ids=["2 ranks"])
@pytest.mark.parametrize("to", [1, 3, 4])
def test_forty_losses_after_a_move_are_those_of_the_first_mesh(runs, tmp_path, ranks, to):
    changes = BATCH | {"recipe.name": "fp32", "training.steps": 50}
    goes_on_alike(runs, tmp_path, changes, ranks, to, 1e-6)


@case("B2", tier="thorough")
@pytest.mark.parametrize("ranks", [3], ids=["3 ranks"])
@pytest.mark.parametrize(
    "recipe", ["mxfp8", *(pytest.param(name, marks=LATER) for name in ("msamp-o2", "fp8-block", "nvfp4"))]
)
def test_dimensions_that_divide_into_nothing(runs, tmp_path, recipe, ranks):
    """A block is of the global tensor: shards of 40 / 3 rows leave its grid where it was."""
    changes = BATCH | ODD | {"recipe.name": recipe}
    goes_through(runs, tmp_path / "still", changes, [(ranks, ()), (1, ()), (2, ())])
    # Sums of gradients in FP8 depend on how many are summed: how they are cut is what is tested here.
    wide = {"recipe.reduce": "fp32", "recipe.grad": "fp32"} if recipe.startswith("msamp") else {}
    goes_on_alike(runs, tmp_path, changes | wide | {"training.steps": 20}, ranks, 1, 1e-5)


@case("B3", tier="thorough")
@pytest.mark.parametrize("ranks", [3], ids=["3 ranks"])
def test_a_batch_that_the_ranks_do_not_divide(runs, out, ranks):
    ended = runs.start(runs.words({"training.batch_size": 8}), out, ranks).wait(20)
    assert set(ended.codes) == {2}
    assert "training.batch_size" in ended.err
    assert "set --training.batch_size 9" in ended.err
    assert "Traceback" not in ended.err
    assert not (out / "metrics.jsonl").exists()


@case("B4", tier="thorough")
@pytest.mark.parametrize("ranks", [4], ids=["4 ranks"])
def test_between_sharding_and_sharding_with_tensor_parallelism(runs, tmp_path, ranks):
    fsdp = ("--parallel.shard", "4")
    both = ("--parallel.shard", "2", "--parallel.tensor", "2")
    changes = BATCH | {"recipe.name": "mxfp8", "model.kv_heads": 4}  # whole blocks on each of two
    goes_through(runs, tmp_path / "still", changes, [(ranks, fsdp), (ranks, both)])
    changes = BATCH | {"recipe.name": "fp32", "training.steps": 50}
    goes_on_alike(runs, tmp_path, changes, ranks, ranks, 1e-6, fsdp, both)
