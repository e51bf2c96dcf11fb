"""What a mixture of experts cannot do is refused in a sentence that names thing, rule and way out."""

from dataclasses import replace

import pytest
import torch

from narrowgauge.analysis.gradient import Position
from narrowgauge.analysis.probe import Subject
from narrowgauge.analysis.sensitivity import forward_costs
from narrowgauge.checkpoint.interop.hf_config import config_from, family_of
from narrowgauge.checkpoint.interop.llmc import write_llmc
from narrowgauge.data import Batch
from narrowgauge.errors import UserError
from narrowgauge.models import Transformer, model_config
from narrowgauge.quantization import cast
from narrowgauge.runs.loop.parallel_dims import parallel_dims_of
from narrowgauge.training.config.config import make_config

TWO_D = "with parallel.tensor x parallel.context = 2: the tokens of an expert come from full sequences on one"
NOT_SHARDED = (
    "experts are divided over processes that shard the other weights; set parallel.shard to a multiple"
)
GRIDS = {
    "tensor": ({"parallel.tensor": 2}, f"model.experts = 4 {TWO_D}"),
    "context": ({"parallel.context": 2}, f"model.experts = 4 {TWO_D}"),
    "both": ({"parallel.expert": 2, "parallel.tensor": 2}, f"model.experts = 4 {TWO_D}"),
    "balance in a pipeline": (
        {"parallel.pipeline": 2},
        "training.balance_loss = 0.01 with 2 pipeline stages: the loss is computed in the last stage, and "
        "the balance of experts in all; set --training.balance_loss 0",
    ),
    "compile": (
        {"training.compile": True},
        "model.experts = 4 with training.compile = true: how many tokens an expert has is not known when "
        "code is compiled; set --training.compile false",
    ),
    "more a token than there are": (
        {"model.experts_per_token": 5},
        "model.experts_per_token = 5 must be at most model.experts = 4; lower it",
    ),
    "none to divide": (
        {"model.experts": 0, "parallel.expert": 2},
        "parallel.expert = 2, and the model has no experts to divide; leave it out, or take a mixture of "
        "experts (--model moe-debug, or model.experts)",
    ),
    "no divisor": (
        {"model.experts": 3, "parallel.expert": 2},
        "model.experts = 3 cannot be divided by parallel.expert = 2; choose a divisor",
    ),
    "more than shard": (
        {"parallel.expert": 4},
        f"parallel.expert = 4 with parallel.shard = 2 and parallel.zero = 3: {NOT_SHARDED} of 4, "
        "and parallel.zero to 1, 2 or 3",
    ),
    "whole weights": ({"parallel.expert": 2, "parallel.replicate": 2}, NOT_SHARDED),
    "zero 0": (
        {"parallel.expert": 2, "parallel.zero": 0},
        "parallel.zero = 0: experts are divided over",
    ),
    "rows of a block of state": (
        {
            "parallel.expert": 2,
            "parallel.shard": 4,
            "recipe.m": "fp8-128x128",
            "model.dim": 512,
            "model.kv_heads": 1,
        },
        "m of blocks.0.experts.0.gate_up: cast 'fp8-128x128' has blocks of 128, and dividing 192 outputs "
        "over parallel.shard / parallel.expert = 2 would cut some",
    ),
}


@pytest.mark.parametrize(("changes", "words"), GRIDS.values(), ids=GRIDS)
def test_a_run(tiny, changes, words):
    sizes = {
        "training.batch_size": 4,
        "training.micro_batch_size": 1,
        "model.kv_heads": 2,
        "model.ffn_dim": 96,
    }
    values = tiny({"model.experts": 4, "recipe.name": "bf16"} | sizes | changes)
    with pytest.raises(UserError) as refused:
        parallel_dims_of(make_config(values), changes.get("parallel.shard", 2))
    assert words in str(refused.value)
    assert refused.value.exit_code == 2


SIZES = {"dim": 16, "layers": 1, "heads": 2, "kv_heads": 2, "ffn_dim": 16, "vocab_size": 20, "experts": 4}
GELU = {"mlp": "gelu", "bias": True, "norm": "layer", "positions": "learned"}


def sensitivity(config):
    spec = replace(make_config({}).spec, model=config)
    weights = dict(Transformer(config).named_parameters())
    x_BT = torch.zeros(1, 4, dtype=torch.long)
    batches = [Batch(x_BT, x_BT, 4, None)]
    forward_costs(Subject(spec, weights, Position(0, 0, 0, 1), batches, torch.device("cpu")), cast("mxfp4"))


MIXTRAL = {
    **{"model_type": "mixtral", "hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 20},
    **{"num_attention_heads": 2, "intermediate_size": 16, "sliding_window": None},
}
OTHERS = {
    "sensitivity, search": (
        sensitivity,
        {},
        "model.experts = 4: sensitivity and search weigh a layer by GEMMs with all tokens, and an expert "
        "has some; compare recipes of this model with probe",
    ),
    "llm.c": (
        lambda config: write_llmc("model.bin", config, {}, torch.float32),
        GELU | {"qkv_bias": True},
        "llm.c's model files hold GPT-2 only, which has experts = 0, unlike this model; use --to hf",
    ),
    "hf": (family_of, GELU, "with experts Qwen3 and Mixtral (no qk_norm, no bias, norm_topk_prob)"),
    "hf, weights that sum to less": (family_of, {"norm_topk_prob": False}, "qk_norm = False, experts = 4"),
    "from hf": (
        lambda _: config_from(MIXTRAL | {"router_jitter_noise": 0.1}, "config.json"),
        {},
        "router_jitter_noise",
    ),
}


@pytest.mark.parametrize(("use", "changes", "words"), OTHERS.values(), ids=OTHERS)
def test_another_program_or_an_analysis(use, changes, words):
    with pytest.raises(UserError) as refused:
        use(model_config("debug", **(SIZES | changes)))
    assert words in str(refused.value)
    assert refused.value.exit_code == 2
