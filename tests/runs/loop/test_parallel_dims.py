"""What a grid of processes cannot do is refused by name, before any data is read."""

import numpy as np
import pytest
import torch

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.data import Mixture, TokenStream, validation_batches
from narrowgauge.trainer.runs.loop.resolve import lay_out, parallel_dims_of
from narrowgauge.trainer.runs.run_directory import RunDirectory
from narrowgauge.trainer.training.config.config import held_out_sequences, load_values, make_config
from support.fault_table import case

DENSE = {"dim": 256, "heads": 4, "kv_heads": 4, "ffn_dim": 256}
EXPERTS = {"experts": 4, "kv_heads": 2, "ffn_dim": 96}
BOTH = {"tensor": 2, "context": 2}


def dims_of(tiny, model, parallel, recipe, **more):
    """The grid of a model of this kind; `more` has other keys of the model, the data and the training."""
    processes = more.pop("processes", None)
    if processes is None:
        processes = max(2, parallel.get("shard", 1), parallel.get("tensor", 1) * parallel.get("context", 1))
    sections = {"length": "data.sequence_length", "batch": "training.batch_size"}
    sections |= {"micro": "training.micro_batch_size"}
    base = {"length": 256 if model is DENSE else 32, "batch": 4} | more
    changes = {sections.get(k, k if "." in k else f"model.{k}"): v for k, v in {**model, **base}.items()}
    changes |= {f"parallel.{k}": v for k, v in parallel.items()}
    recipe = {"name": recipe} if isinstance(recipe, str) else recipe
    changes |= {f"recipe.{k}": v for k, v in recipe.items()}
    return parallel_dims_of(make_config(tiny(changes)), processes)


TRANSFORMED = {"name": "bf16", "wgrad": {p: {"cast": "bf16", "hadamard": 32} for p in ("dy", "x")}}
BLOCKED = {"name": "bf16", "m": "fp8-128x128"}
WHOLE = "model.experts = 4 with parallel.tensor x parallel.context = 2: the tokens of an expert come from"
WITH_TENSOR = {"expert": 2, "tensor": 2}
#: What is refused: the model, the grid, the recipe, other values, and a part of the sentence.
REFUSED = [
    # a block that would be cut: the place, the layer, the cast, what is divided, and by what
    (DENSE, {"tensor": 2}, "fp8-block", {"ffn_dim": 192},
     "fprop.w of blocks.0.gate_up: cast 'fp8-128x128' has blocks of 128, and dividing 384 outputs over "
     "parallel.tensor = 2 would cut some; use fewer processes there, another dimension, or another cast"),
    (DENSE, {"tensor": 2}, {"name": "fp8", "fprop.x": "mxfp8"}, {"ffn_dim": 96},
     "fprop.x of blocks.0.down: cast 'mxfp8' has blocks of 32, and dividing 96 inputs over"),
    (DENSE, {"context": 2}, "mxfp8", {"length": 48},
     "wgrad.dy of blocks.0.qkv: cast 'mxfp8' has blocks of 32, and dividing 48 tokens over parallel.context"),
    (DENSE, BOTH, {"name": "bf16", "wgrad.dy": "mxfp8"}, {"length": 64},
     "wgrad.dy of head: cast 'mxfp8' has blocks of 32, and dividing 64 tokens over parallel.context = 2 x"),
    (DENSE, {"context": 2}, TRANSFORMED, {"length": 48}, "cast 'bf16' has transforms of 32, and dividing 48"),
    (DENSE, {"tensor": 2}, {"name": "fp8", "saved": "fp8-1x128"}, {"ffn_dim": 128},
     "saved of blocks.0.down: cast 'fp8-1x128' has blocks of 128, and dividing 128 inputs"),
    (DENSE, {"tensor": 2}, {"name": "fp8", "grad": "fp8-1x128"}, {"ffn_dim": 384},
     "grad of blocks.0.down: cast 'fp8-1x128' has blocks of 128"),
    (EXPERTS, {"expert": 2, "shard": 4}, BLOCKED, {"dim": 512, "kv_heads": 1},
     "m of blocks.0.experts.0.gate_up: cast 'fp8-128x128' has blocks of 128, and dividing 192 outputs over "
     "parallel.shard / parallel.expert = 2 would cut some"),
    # a batch that no schedule fits, with the sizes that would
    (DENSE, {"pipeline": 2}, "fp8", {"micro": 4},
     "parallel.pipeline = 2 needs as many micro-batches a step, and there are 1; set "
     "--training.micro_batch_size 2 or 1, leave it out and one is chosen, or set --training.batch_size 8"),
    (DENSE, {"chunks": 2}, "fp8", {"processes": 1}, "parallel.chunks = 2 with parallel.pipeline = 1: chunks"),
    (DENSE, {"pipeline": 2, "chunks": 2}, "fp8", {"layers": 4, "batch": 3},
     "3 micro-batches a step are not a multiple of parallel.pipeline = 2; set --training.batch_size 4, or"),
    (DENSE, {}, "fp8", {"batch": 8, "micro": 8},
     "training.batch_size = 8 in micro-batches of 8 cannot be cut over parallel.replicate x parallel.shard = "
     "2 processes; set --training.micro_batch_size 4 or 2 or 1, leave it out and one is chosen, or set"),
    (DENSE, {"replicate": 3}, "fp8", {"batch": 8, "processes": 3},
     "training.batch_size = 8 cannot be divided over parallel.replicate x parallel.shard = 3 processes;"),
    # experts
    *((EXPERTS, grid, "bf16", {}, WHOLE) for grid in ({"tensor": 2}, {"context": 2}, WITH_TENSOR)),
    (EXPERTS, {"pipeline": 2}, "bf16", {}, "training.balance_loss = 0.01 with 2 pipeline stages: the"),
    (EXPERTS, {}, "bf16", {"training.compile": True}, "model.experts = 4 with training.compile = true: how"),
    (DENSE, {"expert": 2}, "bf16", {}, "parallel.expert = 2, and the model has no experts to divide; leave"),
    (EXPERTS, {"expert": 2}, "bf16", {"experts": 3}, "model.experts = 3 cannot be divided by"),
    (EXPERTS, {"expert": 4}, "bf16", {},
     "parallel.expert = 4 with parallel.shard = 2 and parallel.zero = 3: experts are divided over processes "
     "that shard the other weights; set parallel.shard to a multiple of 4, and parallel.zero to 1, 2 or 3"),
    (EXPERTS, {"expert": 2, "zero": 0}, "bf16", {}, "parallel.zero = 0: experts are divided over"),
]  # fmt: skip


@case("B3", tier="quick")
@pytest.mark.parametrize(("model", "parallel", "recipe", "more", "words"), REFUSED)
def test_a_grid_that_cannot_be_is_refused(tiny, model, parallel, recipe, more, words):
    with pytest.raises(UserError) as refused:
        dims_of(tiny, model, parallel, recipe, **more)
    assert words in str(refused.value)
    assert refused.value.exit_code == 2


NARROW = {"dim": 32, "vocab_size": 66, "ffn_dim": 33}
FITTING = [
    ({"tensor": 2}, "fp8-block", {}),  # whole blocks
    ({"tensor": 2}, "fp8-row", {}),  # a block of the full extent is shared
    ({"tensor": 4}, "mxfp8", {"length": 32}),  # layers that are kept out
    ({}, "mxfp8", {"length": 48, "micro": 2}),  # ragged blocks that nobody divides
    ({"zero": 0}, BLOCKED, {}),  # whole weights
    ({}, {"name": "fp8", "m": "nvfp4-2d"}, NARROW),  # small matrices have wide moments
]


@pytest.mark.parametrize(("parallel", "recipe", "more"), FITTING)
def test_a_grid_that_cuts_no_block_is_taken(tiny, parallel, recipe, more):
    assert dims_of(tiny, DENSE, parallel, recipe, **more).size > 1


#: The micro-batch of (processes, training, parallel), and part of the sentence that tells it.
CHOSEN = [
    (1, {}, {}, 8, ""),
    (1, {"batch_size": 6}, {}, 6, "has 6 of the 6 sequences"),
    (2, {}, {}, 4, "of 4 (training.micro_batch_size), which was chosen: each process has 4"),
    (8, {}, {"replicate": 8}, 1, "each process has 1 of the 8"),
    (2, {}, {"pipeline": 2}, 4, "each process has 8 of the 8"),
    (2, {"batch_size": 12}, {"pipeline": 2, "chunks": 2}, 6, "of the 12"),
    (2, {"micro_batch_size": 16, "fit_micro_batch": True}, {}, 4, "which was chosen"),
]


@pytest.mark.parametrize(("processes", "training", "parallel", "size", "words"), CHOSEN)
def test_a_micro_batch_that_nobody_gave_is_chosen_and_said(processes, training, parallel, size, words):
    found = lay_out(make_config({"training": training, "parallel": parallel}), processes)
    assert found.config.training.micro_batch_size == size
    assert words in found.choice
    assert bool(words) == bool(found.choice)


def test_the_micro_batch_of_a_run_is_kept_where_it_fits(tmp_path):
    """Another number of processes continues with it, or with the largest below that fits, and reports it."""
    directory = RunDirectory(tmp_path / "run")

    def go_on(processes, **training):
        found = lay_out(make_config({"training": training}), processes, directory.path)
        changes = directory.claim(found.config)
        directory.adopt(found.config, changes, "digest", 3, directory.run_id("digest"))
        return directory.config().training.micro_batch_size, found.choice

    assert go_on(1) == (8, "")
    before = directory.run_id("digest")
    size, choice = go_on(2)
    assert (size, choice.partition("; ")[2]) == (4, "they were of 8")
    assert go_on(1) == (4, "micro-batches of 4 (training.micro_batch_size), as before in this run")
    assert go_on(1, micro_batch_size=4) == (4, "")
    assert [line["changes"] for line in directory.lines()] == [{"training.micro_batch_size": [8, 4]}]
    assert directory.run_id("digest") == before, "its checkpoints are still its own"
    with pytest.raises(UserError, match=r"training\.micro_batch_size = 4, and now it is 2; restore"):
        go_on(2, micro_batch_size=2)
    own = make_config(load_values(directory.path / "config.toml"))
    assert lay_out(own, 4, directory.path).config.training.micro_batch_size == 2, "by its own file, too"


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_a_validation_is_of_the_same_text_however_a_step_is_divided(processes):
    """Where a micro-batch is chosen for several processes, a validation has more of them."""
    values = {"training": {"batch_size": 16}, "validation": {"batches": 3}}
    found = lay_out(make_config(values), processes).config
    sequences = held_out_sequences(found.training, found.validation.batches)
    assert sequences == 3 * 8
    size, tokens = found.training.micro_batch_size, Mixture((TokenStream((np.arange(1000),)),))
    held_out = [batch.x_BT[:, 0] for batch in validation_batches(tokens, size, 10, sequences=sequences)]
    assert torch.equal(torch.cat(held_out), torch.arange(24) * 99 // 24 * 10)
    given = {**values, "training": {"batch_size": 16, "micro_batch_size": 4}}
    assert held_out_sequences(lay_out(make_config(given), processes).config.training, 3) == 3 * 4
