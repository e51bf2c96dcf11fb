"""The state of a run goes to a checkpoint and comes back bit for bit, and to no other model."""

import math

import pytest
import torch

from narrowgauge.quantization import ShardAxis, TensorShard, ensure_state, full_axis
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.checkpoint import load
from narrowgauge.trainer.data import Batch, prepare
from narrowgauge.trainer.training import make_config
from narrowgauge.trainer.training.step.build_model import model_of
from narrowgauge.trainer.training.step.train_state import local_tensors_of
from narrowgauge.trainer.training.step.trainer import Trainer
from support.in_process import bits

CPU = torch.device("cpu")


@pytest.fixture
def corpus(text):
    return prepare(text, "bytes")


def begin(tiny, changes=None):
    return Trainer.begin(make_config(tiny(changes)), CPU)


LATER = pytest.mark.tier("thorough")
PARTS = {"model.dropout": 0.1, "model.attention_dropout": 0.1, "model.qk_norm": True, "training.z_loss": 0.01}
GPT2 = {"model.name": "gpt2-debug", "model.kv_heads": 2}
EXPERTS = {"model.experts": 4, "recipe.name": "msamp-o2", "training.recompute": True}


# nn/test_transformer_places.py copies experts under each recipe
@pytest.mark.parametrize(
    "changes", [GPT2, *(pytest.param(c, marks=LATER) for c in (PARTS, EXPERTS))], ids=str
)
def test_a_restored_state_goes_on_to_the_same_bits(tiny, corpus, tmp_path, changes):
    changes = {"recipe.name": "nvfp4"} | changes
    one = begin(tiny, changes)
    for _ in range(3):
        one.train_step(one.batches(corpus.train))
    one.guard.skips_in_a_row = 7
    path = one.plan_save(tmp_path, "me").write()
    other = begin(tiny, changes | {"log.every": 3})
    other.train_step(other.batches(corpus.train))  # a trainer in another state is restored to the same
    other.restore(path)
    assert (other.step, other.guard.skips_in_a_row) == (3, 7)
    for _ in range(3):
        assert one.train_step(one.batches(corpus.train)) == other.train_step(other.batches(corpus.train))
    assert bits(one) == bits(other)
    assert (other.model.head.weight is other.model.embedding.weight) == (changes.keys() > GPT2.keys()), "tied"


def test_a_last_shard_without_a_whole_block_has_the_place_of_its_scales_and_bytes():
    """Rows 128 to 254, under blocks of 128 rows and with two codes a byte."""
    p = torch.nn.Parameter(torch.zeros(127, 2))
    ensure_state(p).shard = TensorShard((ShardAxis(255, ((128, 127),), (None,)), full_axis(2)))
    stored = {
        f"w.m.{name}": torch.zeros(rows, 2) for name, rows in (("x", 127), ("scales", 1), ("codes", 64))
    }
    slices = local_tensors_of({"optimizer": stored}, {"w": p})["optimizer"].values()
    assert [(s.shape[0], s.offset[0]) for (s,) in slices] == [(255, 128), (2, 1), (128, 64)]


def test_micro_batches_weigh_by_their_targets(tiny):
    trainer = begin(tiny, {"training.batch_size": 4, "training.micro_batch_size": 2})
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    taken = trainer.next_micro_batches(
        iter([Batch(tokens, tokens, targets=48), Batch(tokens, tokens, targets=16)])
    )
    assert [(first, weight) for first, _, weight in taken] == [(0, 0.75), (2, 0.25)]


def test_masks_do_not_depend_on_the_micro_batch_and_a_z_loss_changes_no_loss(tiny, corpus):
    """All in fp32: what differs is the order of sums."""
    taken = []
    for size, z_loss in ((1, 0.01), (4, 0.01), (4, 0.0)):
        sizes = {"training.batch_size": 4, "training.micro_batch_size": size, "training.z_loss": z_loss}
        small = {"model.initial_std": 0.02}  # logits
        trainer = begin(tiny, {"recipe.name": "fp32", **PARTS, **sizes, **small})
        loss, norm, _ = trainer.train_step(trainer.batches(corpus.train))
        taken.append((loss, norm, trainer.terms.get("z_loss")))
    assert taken[0] == pytest.approx(taken[1], rel=1e-6)
    assert taken[1][0] == taken[2][0]
    assert taken[1][1] != pytest.approx(taken[2][1], rel=1e-4)
    assert taken[2][2] is None
    logarithm = (taken[1][2] / 0.01) ** 0.5  # of the sum of the exponentials of 257 small logits
    assert logarithm == pytest.approx(math.log(257), rel=0.02)


def test_a_step_says_how_the_experts_share_its_tokens(tiny, corpus):
    """Two layers, two micro-batches of 32 tokens, each token at two of four experts."""
    changes = {"model.experts": 4, "training.z_loss": 0.01, "training.recompute": True}
    changes["model.initial_std"] = 0.02  # at first every token is about as likely
    trainer = begin(tiny, {"recipe.name": "fp8-delayed", "training.balance_loss": 0.01, **changes})
    for _ in range(2):
        loss, _, _ = trainer.train_step(trainer.batches(corpus.train))
    assert list(trainer.terms) == ["z_loss", "balance_loss", "busiest_expert"]
    assert loss == pytest.approx(math.log(257), rel=0.05)
    assert {name: sum(tokens) for name, tokens in trainer.tokens.items()} == {
        "blocks.0.experts.router": 128,
        "blocks.1.experts.router": 128,
    }
    busiest = max(max(tokens) for tokens in trainer.tokens.values())
    assert trainer.terms["busiest_expert"] == busiest / 32
    assert 0.02 <= trainer.terms["balance_loss"] < 0.04  # of 2 at best and 4 at worst


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.dim": 64}, r"'blocks\.0.*' is torch\.float32 \(32,\) there and torch\.float32 \(64,\) here"),
        ({"model.layers": 3}, r"'blocks\.2\..*' is absent there"),
        ({"model.layers": 1}, r"'blocks\.1\..* and absent here"),
    ],
)
def test_another_model_is_refused(tiny, corpus, tmp_path, changes, words):
    checkpoint = load(begin(tiny).plan_save(tmp_path, "me").write())
    with pytest.raises(UserError, match=f"is of another model or recipe: {words}"):
        model_of(make_config(tiny(changes)), checkpoint, CPU)
