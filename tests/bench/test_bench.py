"""The counted work of a step; and the peers that are timed with it do the same work."""

import json

import pytest
import torch

from narrowgauge.recipes import choose_backend, named_device, recipe_names
from narrowgauge.system.devices import imagine
from narrowgauge.system.torch_compat import scaled_mm
from narrowgauge.trainer.bench.ceilings import Ceilings, block_arguments
from narrowgauge.trainer.bench.peers import peer_step
from narrowgauge.trainer.bench.work import Attention, Gemm, work_of
from narrowgauge.trainer.bench.worker import random_batches
from narrowgauge.trainer.cli.main import main
from narrowgauge.trainer.models import flops_per_token
from narrowgauge.trainer.simulate import H200, count_step
from narrowgauge.trainer.training import make_config
from narrowgauge.trainer.training.step.trainer import Trainer

CPU = torch.device("cpu")
FOUR = {"training.batch_size": 4, "training.micro_batch_size": 2}


@pytest.fixture
def config(tiny):
    return lambda recipe="fp8", **changes: make_config(tiny({"recipe.name": recipe} | changes))


def test_products_are_those_that_mfu_counts_and_the_floor_adds_up_what_each_takes(config):
    c = config(**FOUR)
    work, model, T = work_of(c, native=False), c.spec.model, 32
    attention = 12 * model.layers * model.heads * model.head_dim * T
    assert work.flops == (flops_per_token(model, T) - attention) * 4 * T
    assert work.attention == Attention(2, 2, 1, T, 16, "bf16")
    floor = Ceilings(dict.fromkeys(work.gemms, 1e-3), 2e-3, 3e-3, 1e9).floor_ms(work)
    assert floor["GEMMs"] == pytest.approx(sum(work.gemms.values()))
    assert floor["attention"] == pytest.approx(2 * work.attention_forward + 3 * work.attention_backward)
    assert floor["optimizer"] == pytest.approx(work.moved["optimizer"] / 1e6)


@pytest.mark.tier("thorough")  # gpu_budget/ counts native matmuls of a real step
def test_native_products_are_counted_in_their_own_format(config):
    """And the one that is timed for it is a product of that scheme, which torch's own checks take."""
    kinds = {"fp8": "fp8", "mxfp8": "mxfp8", "nvfp4": "fp4"}
    for recipe, kind in kinds.items():
        gemms = work_of(config(recipe), native=True).gemms
        assert {gemm.kind for gemm in gemms} == {"bf16", kind}, "the head is kept"
    for kind, element in (("mxfp8", torch.float8_e4m3fn), ("fp4", torch.float4_e2m1fn_x2)):
        with imagine(named_device("b200")):
            given = block_arguments(Gemm(64, 128, 256, kind), torch.device("meta"))
            assert given["mat_a"].dtype == element
            assert scaled_mm(**given).shape == (64, 128)


FLOOR = {"dim": 256, "heads": 4, "kv_heads": 2, "ffn_dim": 512, "layers": 2, "vocab_size": 512}


@pytest.mark.tier("nightly", keep=("bf16", "fp8-delayed", "nvfp4", "msamp-o2", "mxfp4", "coat"))
@pytest.mark.tier("thorough", keep=("bf16", "nvfp4"))
@pytest.mark.parametrize("recipe", recipe_names())
def test_the_floor_is_never_above_the_count_of_the_step(recipe):
    """FLOPs, bytes, and the bytes of the update. Kernels that also cast form no separate class."""
    h200, batches = named_device("h200"), {"batch_size": 4, "micro_batch_size": 2}
    sizes = {"model": {"name": "debug", **FLOOR}, "data": {"sequence_length": 256}, "training": batches}
    c = make_config(sizes | {"recipe": {"name": recipe}})
    count = count_step(c, h200)
    with imagine(h200):
        work = work_of(c, native=choose_backend(c.spec.recipe, h200).name == "native")
    totals = count.totals(H200)
    micro, update = totals.further, totals.update
    assert work.flops <= count.micro_batches * micro.flops
    assert sum(work.moved.values()) <= count.micro_batches * micro.bytes + update.bytes
    assert work.moved["optimizer"] <= update.bytes


def test_a_peer_does_the_same_work_as_we_do(config):
    c = config("fp32", **FOUR)
    batches = random_batches(c, CPU)
    trainer = Trainer.begin(c, CPU)
    theirs = peer_step("torch fp32", c, CPU, batches)
    in_bf16 = peer_step("torch bf16 parameters", c, CPU, batches)
    loss, *_ = trainer.train_step(iter(batches))
    assert theirs() == pytest.approx(loss, abs=1e-6)
    assert in_bf16() == pytest.approx(loss, rel=2e-2)


@pytest.mark.tier("thorough")
def test_the_command(narrowgauge, line, tmp_path):
    file = tmp_path / "found.json"
    ended = narrowgauge("bench", *line()[1:], "--rounds", "2", "--peers", "torch fp32", "--json", file)
    assert ended.code == 0, ended.err
    found = json.loads(file.read_text())
    own, theirs = (found["seconds"][name] for name in ("narrowgauge", "torch fp32"))
    ratios = sorted(b / a for a, b in zip(own, theirs, strict=True))
    assert len(ratios) == 2
    assert ratios[0] <= found["faster_than"]["torch fp32"]["median"] <= ratios[1]
    assert {gemm["kind"] for gemm in found["ceilings"]["gemms"]} == {"bf16"}
    assert found["floor_ms"].keys() <= found["classes_ms"].keys()
    for word in ("matmul (m, n, k)", "floor / time", "narrowgauge is", found["in_words"]["torch fp32"]):
        assert word in ended.out
    assert found["in_words"]["torch fp32"].startswith("open, "), "two rounds prove nothing"


def test_what_cannot_be_is_one_sentence(line, capsys):
    for words, sentence in (
        (["--peers", "torch fp33"], "unknown peer 'torch fp33'; the nearest is 'torch fp32'"),
        (["--peers", "torchao tensorwise"], "peer 'torchao tensorwise' "),
        (["--rounds", "none"], "argument --rounds: 'none' is not a whole number above 0"),
    ):
        assert main(["bench", *line()[1:], *words]) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"narrowgauge: {sentence}"), err
        assert err.count("\n") == 1
