"""Sizes of a model: what is derived, which mistakes are refused, and the names of shipped sizes."""

import pytest

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.models import ModelConfig, model_config, model_names
from narrowgauge.trainer.models.sizes import ALIASES, name_of

SMALL = {"dim": 64, "layers": 1, "heads": 4, "ffn_dim": 128, "vocab_size": 50, "max_sequence_length": 16}


def small(**overrides):
    return ModelConfig(**(SMALL | overrides))


def test_what_is_left_out_is_derived():
    assert (small().kv_heads, small().head_dim, small().qkv_bias) == (4, 16, False)
    assert small(bias=True).qkv_bias is True
    assert small(bias=True, qkv_bias=False).qkv_bias is False
    assert small(dim=60, heads=8, head_dim=32).head_dim == 32
    assert small(head_dim=5, positions="learned").head_dim == 5, "rules of rope do not bind learned positions"
    c = model_config("gpt2-124m", heads=6, dim=384)
    assert (c.heads, c.kv_heads, c.head_dim, c.ffn_dim) == (6, 6, 64, 3072)
    assert model_config("gpt2-124m").heads == 12


#: Keys of a model, and how the sentence begins and ends.
MISTAKES = [
    ({"heads": 3}, "model.dim = 64 must be a multiple of model.heads = 3", "or give model.head_dim"),
    ({"heads": 8, "kv_heads": 3}, "model.heads = 8 must be a multiple of model.kv_heads = 3", "kv_heads = 2"),
    ({"head_dim": 5}, "model.head_dim = 5 must be even", "model.positions = learned"),
    ({"layers": 0}, "model.layers = 0 must be a whole number", "of at least 1"),
    ({"vocab_size": True}, "model.vocab_size = True must be a whole number", "of at least 1"),
    ({"norm": "rsm"}, "unknown model.norm 'rsm'; the nearest is 'rms'", "(known: layer, rms)"),
    ({"norm_eps": 0.0}, "model.norm_eps = 0.0 must be positive", "1e-5 is usual"),
    ({"rope_factor": 0.5}, "model.rope_factor = 0.5 must be at least 1", "1 turns the scaling off"),
    ({"rope_low_freq_factor": 4.0}, "model.rope_low_freq_factor = 4.0 must be positive and below", "1 and 4"),
    ({"experts": 8, "experts_per_token": 9}, "model.experts_per_token = 9 must be at most", "8; lower it"),
    ({"dropout": 1.0}, "model.dropout = 1.0 must be at least 0 and below 1", ""),
]


@pytest.mark.parametrize(("overrides", "begins", "ends"), MISTAKES)
def test_every_broken_rule_is_one_sentence(overrides, begins, ends):
    with pytest.raises(UserError) as error:
        small(**overrides)
    assert str(error.value).startswith(begins)
    assert str(error.value).endswith(ends)


def test_unknown_names_and_keys_name_the_nearest():
    for name, changes, sentence in (
        ("lama3-1b", {}, r"^unknown model 'lama3-1b'; the nearest is 'llama3-1b' \(known: "),
        ("debug", {"layer": 3}, r"^unknown model key 'layer'; the nearest is 'layers' \(known: "),
        ("custom", {}, r"^a model called 'custom' .* model\.dim is not given; give dim, layers"),
    ):
        with pytest.raises(UserError, match=sentence):
            model_config(name, **changes)


def test_every_name_is_a_valid_configuration_that_knows_its_name():
    assert {"debug", "gpt2-debug", "gpt2-124m", "llama3-1b"} <= set(model_names())
    for name in model_names():
        same = name_of(model_config(name, max_sequence_length=77, initial_std=0.5))
        # GPT-3 of 345 million is GPT-2 of 350 million, but for the data.
        assert same == ("gpt2-350m" if name == "gpt3-345m" else name)
        assert name_of(model_config(name, ffn_dim=77)) == "custom"
    for other, name in ALIASES.items():
        assert model_config(other) == model_config(name)
        assert other not in model_names()
    assert model_config("custom", **SMALL).head_dim == 16
    for name in ("debug", "gpt2-debug"):  # which fit every block shape
        c = model_config(name)
        widths = [c.dim, c.ffn_dim, c.heads * c.head_dim, c.kv_heads * c.head_dim, c.vocab_size]
        assert all(width % 128 == 0 for width in widths)
