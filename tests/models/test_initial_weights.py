"""Initial weights: a standard deviation for each role, or the published one for all."""

import math

import pytest
import torch

from narrowgauge.trainer.models import Transformer, initialize, model_config, model_names, starting_values

OURS = ("debug", "ladder-1m", "gpt2-debug", "moe-debug")
SMALL = {"layers": 2, "heads": 4, "kv_heads": 4, "vocab_size": 512, "max_sequence_length": 256}


def values_of(config, seed=0):
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Transformer(config).named_parameters()}
    return dict(starting_values(config, shapes, seed))


def test_published_models_keep_their_published_standard_deviation():
    found = {name: model_config(name).initial_std for name in model_names()}
    assert {name for name, std in found.items() if std == 0} == set(OURS)
    assert found["gpt3-6.7b"] == found["gpt3-13b"] == 0.0099
    assert found["gpt2-124m"] == found["llama3-8b"] == found["qwen2.5-7b"] == found["mixtral-8x7b"] == 0.02
    assert model_config("custom", **SMALL, dim=64, ffn_dim=96).initial_std == 0, "a rule by role"


@pytest.mark.parametrize("name", OURS)
def test_a_given_standard_deviation_holds_for_all_weights(name):
    """The draws match every run that was made before the sizes had a rule by role."""
    config = model_config(name, **SMALL, dim=128, initial_std=0.02)
    generator = torch.Generator().manual_seed(3)
    for parameter, value in values_of(config, 3).items():
        if value.ndim == 2:
            writes = parameter.endswith(("attention_out.weight", "down.weight"))
            std = 0.02 / math.sqrt(4) if writes else 0.02
            drawn = torch.empty(value.shape).normal_(0.0, std, generator=generator)
            assert torch.equal(value, drawn), parameter
        else:
            assert (value == (0 if parameter.endswith("bias") else 1)).all(), parameter


@pytest.mark.parametrize("name", ["debug", "gpt2-debug"])
def test_values_are_a_function_of_the_seed_and_no_device_or_dtype(name):
    """Drawing them leaves torch's own generator alone."""
    config, before = model_config(name, **SMALL, dim=128), torch.get_rng_state()
    values = values_of(config, 5)
    narrow = Transformer(config, torch.bfloat16).to(torch.bfloat16)
    with torch.device("meta"):
        empty = Transformer(config)
    torch.set_rng_state(before)
    for model in (narrow, empty.to_empty(device="cpu")):
        initialize(model, 5)
        for key, parameter in model.named_parameters():
            assert torch.equal(parameter, values[key].to(parameter.dtype)), key
        assert (model.head.weight is model.embedding.weight) == config.tied_head
    assert torch.equal(before, torch.get_rng_state())
    assert not torch.equal(values_of(config, 6)["embedding.weight"], values["embedding.weight"])


@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize("name", OURS)
def test_each_role_has_its_standard_deviation(name, dim):
    config = model_config(name, **SMALL, dim=dim)
    unit = 1 / math.sqrt(dim)
    embedding = unit / 2 if config.tied_head else 0.2
    roles = {"embedding": embedding, "position_embedding": embedding, "head": unit}
    for parameter, value in values_of(config).items():
        if value.ndim < 2:
            continue
        module = parameter.removesuffix(".weight")
        expected = roles.get(module, 1 / math.sqrt(value.shape[1]))
        if module.endswith(("attention_out", "down")):
            expected *= embedding / 2
        error = 6 / math.sqrt(2 * value.numel())  # six deviations of a standard deviation of n draws
        assert value.std().item() == pytest.approx(expected, rel=error), parameter
