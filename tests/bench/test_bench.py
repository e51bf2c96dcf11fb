"""The counted work of a step; and the peers that are timed with it do the same work."""

import json
from collections import Counter

import pytest
import torch

from narrowgauge.bench.bench import alive_at_once
from narrowgauge.bench.ceilings import Ceilings, block_arguments
from narrowgauge.bench.peers import peer_step
from narrowgauge.bench.timing import Spread, speed_in_words
from narrowgauge.bench.work import Attention, Gemm, work_of
from narrowgauge.bench.worker import random_batches
from narrowgauge.devices import imagine
from narrowgauge.models import flops_per_token
from narrowgauge.recipes import named_device, recipe_names
from narrowgauge.simulate import count_step
from narrowgauge.torch_compat import scaled_mm
from narrowgauge.training import make_config
from narrowgauge.training.step.trainer import Trainer

CPU = torch.device("cpu")


@pytest.fixture
def config(tiny):
    return lambda **changes: make_config(tiny({key.replace("__", "."): v for key, v in changes.items()}))


def test_products_are_those_that_mfu_counts(config):
    c = config(training__batch_size=4, training__micro_batch_size=2)
    work, model, T = work_of(c, native=False), c.spec.model, 32
    attention = 12 * model.layers * model.heads * model.head_dim * T
    assert work.flops == (flops_per_token(model, T) - attention) * 4 * T
    assert work.attention == Attention(2, 2, 1, T, 16, "bf16")
    assert (work.attention_forward, work.attention_backward) == (2 * model.layers, 2 * model.layers)


@pytest.mark.tier("thorough")  # counts of seconds
def test_recomputed_blocks_do_their_forward_products_again(config):
    once = work_of(config(), native=False)
    again = work_of(config(training__recompute=True), native=False)
    every_other = work_of(config(training__recompute=True, training__recompute_every=2), native=False)
    down = Gemm(32, 32, 64, "bf16")  # forward, four times; and as often qkv's input gradient
    assert [w.gemms[down] for w in (once, every_other, again)] == [8, 10, 12]
    assert again.attention_forward == 2 * once.attention_forward
    assert again.attention_backward == once.attention_backward
    part = work_of(config(training__recompute="selective"), native=False)
    assert part.attention_forward == once.attention_forward
    assert part.gemms[down] == 12
    assert sum(once.gemms.values()) < sum(part.gemms.values()) < sum(again.gemms.values())
    assert (
        once.moved["norms and the rest"]
        < part.moved["norms and the rest"]
        < again.moved["norms and the rest"]
    )


@pytest.mark.tier("thorough")  # gpu_budget/ counts native matmuls of a real step
def test_native_products_are_counted_in_their_own_format(config):
    """And the one that is timed for it is a product of that scheme, which torch's own checks take."""
    kinds = {"fp8": "fp8", "mxfp8": "mxfp8", "nvfp4": "fp4"}
    for recipe, kind in kinds.items():
        gemms = work_of(config(recipe__name=recipe), native=True).gemms
        assert {gemm.kind for gemm in gemms} == {"bf16", kind}, "the head is kept"
    for kind, element in (("mxfp8", torch.float8_e4m3fn), ("fp4", torch.float4_e2m1fn_x2)):
        with imagine(named_device("b200")):
            given = block_arguments(Gemm(64, 128, 256, kind), torch.device("meta"))
            assert given["mat_a"].dtype == element
            assert scaled_mm(**given).shape == (64, 128)


def test_on_a_gpu_each_contestant_has_the_memory_for_itself():
    names = ["narrowgauge", "torch bf16", "torchao rowwise"]
    assert alive_at_once(names, torch.device("cuda")) == [[name] for name in names]
    assert alive_at_once(names, CPU) == [names]


@pytest.mark.tier("thorough")  # counts of seconds
def test_casts_move_what_they_read_and_write(config):
    """Count a layer of 32 -> 96 features and the others, under a recipe in which only the weight is cast."""
    work = work_of(config(recipe__name="bf16"), native=False)
    weights = 2 * (32 * 64 + 32 * 32 + 32 * 128 + 64 * 32) + 257 * 32  # and the head's
    assert work.moved["casts"] == 2 * weights * (4 + 2)
    native = work_of(config(recipe__name="fp8"), native=True).moved["casts"]
    emulated = work_of(config(recipe__name="fp8"), native=False).moved["casts"]
    assert 0 < native < emulated


FLOOR = {"dim": 256, "heads": 4, "kv_heads": 2, "ffn_dim": 512, "layers": 2, "vocab_size": 512}


@pytest.mark.tier("thorough", keep=("bf16", "fp8-delayed", "nvfp4"))
@pytest.mark.parametrize("recipe", recipe_names())
def test_the_floor_is_never_above_the_count_of_the_step(recipe):
    """FLOPs, bytes, and the bytes of the update. Kernels that also cast form no separate class."""
    h200, batches = named_device("h200"), {"batch_size": 4, "micro_batch_size": 2}
    sizes = {"model": {"name": "debug", **FLOOR}, "data": {"sequence_length": 256}, "training": batches}
    c = make_config(sizes | {"recipe": {"name": recipe}})
    count = count_step(c, h200)
    with imagine(h200):
        work = work_of(c, native=count.backend == "native")
    micro, update = count.micro_batch(), count.of_update()
    assert work.flops <= count.micro_batches * micro.flops
    assert sum(work.moved.values()) <= count.micro_batches * micro.bytes + update.bytes
    assert work.moved["optimizer"] <= update.bytes


@pytest.mark.tier("thorough")  # counts of seconds
def test_narrow_state_moves_less(config):
    """Count weights of 4096 elements and more; the bytes match the account of memory."""
    wide = {"model__dim": 128, "model__ffn_dim": 256, "model__heads": 2, "model__kv_heads": 2}
    fp32, msamp = (work_of(config(recipe__name=r, **wide), native=False) for r in ("fp8", "msamp-o2"))
    assert msamp.moved["optimizer"] < 0.65 * fp32.moved["optimizer"]


def test_the_floor_adds_up_what_each_part_takes(config):
    work = work_of(config(), native=False)
    ceilings = Ceilings(dict.fromkeys(work.gemms, 1e-3), 2e-3, 3e-3, 1e9)
    floor = ceilings.floor_ms(work)
    assert floor["GEMMs"] == pytest.approx(sum(work.gemms.values()))
    assert floor["attention"] == pytest.approx(2 * work.attention_forward + 3 * work.attention_backward)
    assert floor["optimizer"] == pytest.approx(work.moved["optimizer"] / 1e6)


def test_a_peer_does_the_same_work_as_we_do(config):
    c = config(recipe__name="fp32", training__batch_size=4, training__micro_batch_size=2)
    batches = random_batches(c, CPU)
    trainer = Trainer.begin(c.plan, CPU)
    theirs = peer_step("torch fp32", c, CPU, batches)
    in_bf16 = peer_step("torch bf16 parameters", c, CPU, batches)
    loss, _, _ = trainer.train_step(iter(batches))
    assert theirs() == pytest.approx(loss, abs=1e-6)
    assert in_bf16() == pytest.approx(loss, rel=2e-2)


def test_spread_is_the_median_and_the_quartiles():
    assert Spread.of([4.0, 1.0, 2.0, 3.0, 5.0]) == Spread(3.0, 2.0, 4.0)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)


def test_the_word_follows_the_figure_and_its_spread():
    """What was 0.57 times as fast was once called "faster by 0.57"."""
    assert speed_in_words([0.55, 0.57, 0.58, 0.57, 0.61]) == "slower, 0.57x [0.57, 0.58]"
    assert speed_in_words([1.5, 1.4, 1.6, 1.45, 1.55]) == "faster, 1.50x [1.45, 1.55]"
    assert speed_in_words([0.8, 0.9, 0.97, 1.2, 1.3]) == "as fast within the spread, 0.97x [0.90, 1.20]"
    assert speed_in_words([0.57]) == "open, 0.57x in 1 round"


@pytest.mark.tier("thorough")
def test_the_command(narrowgauge, line, tmp_path):
    file = tmp_path / "found.json"
    ended = narrowgauge("bench", *line()[1:], "--rounds", "2", "--peers", "torch fp32", "--json", file)
    assert ended.code == 0, ended.err
    found = json.loads(file.read_text())
    assert {name: len(taken) for name, taken in found["seconds"].items()} == {
        "narrowgauge": 2,
        "torch fp32": 2,
    }
    own, theirs = found["seconds"].values()
    ratios = sorted(b / a for a, b in zip(own, theirs, strict=True))
    assert ratios[0] <= found["faster_than"]["torch fp32"]["median"] <= ratios[1]
    assert found["tokens_per_step"] == 64
    kinds = Counter(gemm["kind"] for gemm in found["ceilings"]["gemms"])
    assert kinds == {"bf16": len(found["ceilings"]["gemms"])}
    assert all(gemm["tflops"] > 0 for gemm in found["ceilings"]["gemms"])
    assert found["floor_ms"].keys() <= found["classes_ms"].keys()
    for word in ("matmul (m, n, k)", "floor / time", "narrowgauge is", found["in_words"]["torch fp32"]):
        assert word in ended.out
    assert found["in_words"]["torch fp32"].startswith("open, "), "two rounds prove nothing"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--peers", "torch fp33"], "unknown peer 'torch fp33'; the nearest is 'torch fp32'"),
        (["--peers", "torchao tensorwise"], "peer 'torchao tensorwise' "),
        (["--rounds", "none"], "--rounds none: it must be a whole number above 0"),
    ],
)
def test_what_cannot_be(narrowgauge, line, words, sentence):
    ended = narrowgauge("bench", *line()[1:], *words)
    assert ended.code == 2
    assert ended.err.startswith(f"narrowgauge: {sentence}"), ended.err
    assert ended.err.count("\n") == 1
