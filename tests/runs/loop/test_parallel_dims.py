"""What a grid of processes cannot do is refused by name, before any data is read."""

import pytest
import torch

from narrowgauge.data import validation_batches
from narrowgauge.errors import UserError
from narrowgauge.runs.loop.parallel_dims import lay_out, parallel_dims_of
from narrowgauge.runs.run_directory import RunDirectory
from narrowgauge.training.config.config import load_values, make_config
from narrowgauge.training.config.micro_batch import held_out_sequences


def layout(tiny, processes, changes):
    base = {
        "model.dim": 256,
        "model.heads": 4,
        "model.kv_heads": 4,
        "model.ffn_dim": 256,
        "data.sequence_length": 256,
        "training.batch_size": 4,
    }
    return parallel_dims_of(make_config(tiny(base | changes)), processes)


BLOCKS = {
    "outputs over tensor": (
        {"recipe.name": "fp8-block", "parallel.tensor": 2, "model.ffn_dim": 192},
        "fprop.w of blocks.0.gate_up: cast 'fp8-128x128' has blocks of 128, and dividing 384 outputs over "
        "parallel.tensor = 2 would cut some; use fewer processes there, another dimension, or another cast "
        "in that place",
    ),
    "inputs over tensor": (
        {"recipe.name": "fp8", "recipe.fprop.x": "mxfp8", "parallel.tensor": 2, "model.ffn_dim": 96},
        "fprop.x of blocks.0.down: cast 'mxfp8' has blocks of 32, and dividing 96 inputs over",
    ),
    "tokens over context": (
        {"recipe.name": "mxfp8", "parallel.context": 2, "data.sequence_length": 48},
        "wgrad.dy of blocks.0.qkv: cast 'mxfp8' has blocks of 32, and dividing 48 tokens over "
        "parallel.context = 2",
    ),
    "tokens of several sequences": (
        {
            "recipe.name": "fp8",
            "recipe.wgrad.dy": "nvfp4",
            "parallel.context": 2,
            "data.sequence_length": 40,
            "training.micro_batch_size": 2,
        },
        "dividing 80 tokens over parallel.context = 2",
    ),
    "tokens of the head over both": (
        {
            "recipe.name": "bf16",
            "recipe.wgrad.dy": "mxfp8",
            "parallel.context": 2,
            "parallel.tensor": 2,
            "data.sequence_length": 64,
        },
        "wgrad.dy of head: cast 'mxfp8' has blocks of 32, and dividing 64 tokens over "
        "parallel.context = 2 x parallel.tensor = 2",
    ),
    "transforms": (
        {
            "recipe.name": "bf16",
            "recipe.wgrad": {place: {"cast": "bf16", "hadamard": 32} for place in ("dy", "x")},
            "parallel.context": 2,
            "data.sequence_length": 48,
        },
        "wgrad.dy of blocks.0.qkv: cast 'bf16' has transforms of 32, and dividing 48 tokens",
    ),
    "what is saved": (
        {"recipe.name": "fp8", "recipe.saved": "fp8-1x128", "parallel.tensor": 2, "model.ffn_dim": 128},
        "saved of blocks.0.down: cast 'fp8-1x128' has blocks of 128, and dividing 128 inputs",
    ),
    "rows of a moment over shard": (
        {"recipe.name": "fp8", "recipe.m": "fp8-128x128"},
        "m of head: cast 'fp8-128x128' has blocks of 128, and dividing 257 outputs over parallel.shard = 2",
    ),
    "stretched moments over tensor": (
        {"recipe.name": "coat", "parallel.tensor": 2, "model.ffn_dim": 384},
        "m of blocks.0.down: cast 'coat' has blocks of 128, and dividing 384 inputs over parallel.tensor = 2",
    ),
    "gradients over tensor": (
        {"recipe.name": "fp8", "recipe.grad": "fp8-1x128", "parallel.tensor": 2, "model.ffn_dim": 384},
        "grad of blocks.0.down: cast 'fp8-1x128' has blocks of 128",
    ),
}


@pytest.mark.parametrize(("changes", "words"), BLOCKS.values(), ids=BLOCKS.keys())
def test_blocks_that_would_be_cut_are_named(tiny, changes, words):
    both = changes.get("parallel.tensor", 1) * changes.get("parallel.context", 1)
    with pytest.raises(UserError) as refused:
        layout(tiny, max(both, 2), changes)
    assert words in str(refused.value)


FITTING = {
    "whole blocks": {"recipe.name": "fp8-block", "parallel.tensor": 2},
    "a block of the full extent is shared": {"recipe.name": "fp8-row", "parallel.tensor": 2},
    "layers that are kept out": {"recipe.name": "mxfp8", "parallel.tensor": 4, "data.sequence_length": 32},
    "ragged blocks that nobody divides": {
        "recipe.name": "mxfp8",
        "data.sequence_length": 48,
        "training.micro_batch_size": 2,
    },
    "whole weights": {"recipe.name": "fp8", "recipe.m": "fp8-128x128", "parallel.zero": 0},
    "small matrices have wide moments": {
        "recipe.name": "fp8",
        "recipe.m": "nvfp4-2d",
        "model.dim": 32,
        "model.vocab_size": 66,
        "model.ffn_dim": 33,
    },
}


@pytest.mark.parametrize("changes", FITTING.values(), ids=FITTING.keys())
def test_a_grid_that_cuts_no_block_is_taken(tiny, changes):
    assert layout(tiny, changes.get("parallel.tensor", 2), changes).size > 1


PIPELINES = {
    "too few micro-batches": (
        2,
        {"parallel.pipeline": 2, "training.micro_batch_size": 4},
        "parallel.pipeline = 2 needs as many micro-batches a step, and there are 1; set "
        "--training.micro_batch_size 2 or 1, leave it out and one is chosen, or set --training.batch_size 8",
    ),
    "chunks of no pipeline": (
        1,
        {"parallel.chunks": 2},
        "parallel.chunks = 2 with parallel.pipeline = 1: chunks are the stages of each process of a "
        "pipeline; set chunks to 1, or pipeline to 2 or more",
    ),
    "chunks that do not take turns": (
        2,
        {"parallel.pipeline": 2, "parallel.chunks": 2, "model.layers": 4, "training.batch_size": 3},
        "3 micro-batches a step are not a multiple of parallel.pipeline = 2; set --training.batch_size 4, or "
        "set --parallel.chunks 1",
    ),
}


@pytest.mark.parametrize(("processes", "changes", "words"), PIPELINES.values(), ids=PIPELINES.keys())
def test_a_pipeline_that_no_schedule_fits_is_refused(tiny, processes, changes, words):
    with pytest.raises(UserError) as refused:
        layout(tiny, processes, changes)
    assert words in str(refused.value)


BATCHES = {
    "micro-batches": (
        2,
        {"training.batch_size": 8, "training.micro_batch_size": 8},
        "training.batch_size = 8 in micro-batches of 8 cannot be cut over parallel.replicate x "
        "parallel.shard = 2 processes; set --training.micro_batch_size 4 or 2 or 1, leave it out and one is "
        "chosen, or set --training.batch_size 16",
    ),
    "shares": (
        3,
        {"training.batch_size": 8, "parallel.replicate": 3},
        "training.batch_size = 8 cannot be divided over parallel.replicate x parallel.shard = 3 processes; "
        "set --training.batch_size 9",
    ),
}


@pytest.mark.parametrize(("processes", "changes", "words"), BATCHES.values(), ids=BATCHES.keys())
def test_a_batch_that_does_not_fit_names_what_would(tiny, processes, changes, words):
    with pytest.raises(UserError) as refused:
        layout(tiny, processes, changes)
    assert str(refused.value) == words


CHOSEN = {
    "one process": (1, {}, {}, 8, ""),
    "one process with a small batch": (1, {"batch_size": 6}, {}, 6, "has 6 of the 6 sequences"),
    "one with a large batch": (1, {"batch_size": 512}, {}, 8, ""),
    "two": (
        2,
        {},
        {},
        4,
        "micro-batches of 4 (training.micro_batch_size), which was chosen: each process has 4",
    ),
    "eight": (8, {}, {"replicate": 8}, 1, "each process has 1 of the 8"),
    "some of them with the same sequences": (8, {}, {"tensor": 2}, 2, "each process has 2 of the 8"),
    "twelve sequences": (1, {"batch_size": 12}, {}, 6, "each process has 12 of the 12"),
    "a pipeline": (2, {}, {"pipeline": 2}, 4, "each process has 8 of the 8"),
    "a pipeline of chunks": (2, {"batch_size": 12}, {"pipeline": 2, "chunks": 2}, 6, "of the 12"),
    "larger ones if they fit": (
        2,
        {"micro_batch_size": 16, "fit_micro_batch": True},
        {},
        4,
        "which was chosen",
    ),
}


@pytest.mark.parametrize(
    ("processes", "training", "parallel", "size", "words"), CHOSEN.values(), ids=CHOSEN.keys()
)
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
    assert go_on(2) == (
        4,
        "micro-batches of 4 (training.micro_batch_size), which was chosen: each process has 4 of the 8 "
        "sequences of a step; they were of 8",
    )
    assert go_on(1) == (4, "micro-batches of 4 (training.micro_batch_size), as before in this run")
    assert go_on(1, micro_batch_size=4) == (4, "")
    assert [line["changes"] for line in directory.lines()] == [{"training.micro_batch_size": [8, 4]}]
    assert directory.run_id("digest") == before, "its checkpoints are still its own"
    with pytest.raises(UserError, match=r"training\.micro_batch_size = 4, and now it is 2; restore"):
        go_on(2, micro_batch_size=2)
    own = make_config(load_values(directory.path / "config.toml"))
    assert lay_out(own, 4, directory.path).config.training.micro_batch_size == 2, "by its own file, too"


@pytest.mark.tier("thorough")
def test_the_command_says_it_once(narrowgauge, line, tmp_path):
    """Before the processes meet."""
    words = line({"recipe.name": "mxfp8", "parallel.context": 2, "model.kv_heads": 2})
    ranks = [
        narrowgauge.start(
            *words,
            "--out",
            tmp_path / "run",
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE="2",
            LOCAL_WORLD_SIZE="2",
            MASTER_ADDR="localhost",
            MASTER_PORT="1",
            TORCHELASTIC_RUN_ID="none",
        )
        for rank in (0, 1)
    ]
    ended = [process.wait() for process in ranks]
    assert [e.code for e in ended] == [2, 2]
    (sentence,) = [text for e in ended for text in e.err.splitlines()]
    assert "wgrad.dy of blocks.0.qkv: cast 'mxfp8' has blocks of 32, and dividing 32 tokens" in sentence
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_a_validation_is_of_the_same_text_however_a_step_is_divided(processes):
    """Where a micro-batch is chosen for several processes, a validation has more of them."""
    values = {"training": {"batch_size": 16}, "validation": {"batches": 3}}
    found = lay_out(make_config(values), processes).config
    sequences = held_out_sequences(found.training, found.validation.batches)
    assert sequences == 3 * 8
    size, tokens = found.training.micro_batch_size, torch.arange(1000).numpy()
    held_out = [batch.x_BT[:, 0] for batch in validation_batches(tokens, size, 10, sequences=sequences)]
    assert torch.equal(torch.cat(held_out), torch.arange(24) * 99 // 24 * 10)
    given = {**values, "training": {"batch_size": 16, "micro_batch_size": 4}}
    assert held_out_sequences(lay_out(make_config(given), processes).config.training, 3) == 3 * 4
