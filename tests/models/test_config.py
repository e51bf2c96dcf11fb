import pytest

from narrowgauge.errors import UserError
from narrowgauge.models import ModelConfig

SMALL = {"dim": 64, "layers": 1, "heads": 4, "ffn_dim": 128, "vocab_size": 50, "max_sequence_length": 16}


def small(**overrides):
    return ModelConfig(**(SMALL | overrides))


def test_what_is_left_out_is_derived():
    assert (small().kv_heads, small().head_dim, small().qkv_bias) == (4, 16, False)
    assert small(bias=True).qkv_bias is True
    assert small(bias=True, qkv_bias=False).qkv_bias is False
    assert small(dim=60, heads=8, head_dim=32).head_dim == 32


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            {"heads": 3},
            "model.dim = 64 must be a multiple of model.heads = 3; change one of them, or give "
            "model.head_dim",
        ),
        (
            {"heads": 8, "kv_heads": 3},
            "model.heads = 8 must be a multiple of model.kv_heads = 3, as each key-value head serves equally "
            "many query heads; use kv_heads = 2",
        ),
        (
            {"head_dim": 5},
            "model.head_dim = 5 must be even, as rotary positions turn pairs of numbers; use an even "
            "head_dim or model.positions = learned",
        ),
        ({"layers": 0}, "model.layers = 0 must be a whole number of at least 1"),
        ({"dim": 64.0}, "model.dim = 64.0 must be a whole number of at least 1"),
        ({"kv_heads": -1}, "model.kv_heads = -1 must be a whole number of at least 0"),
        ({"vocab_size": True}, "model.vocab_size = True must be a whole number of at least 1"),
        ({"norm": "rsm"}, "unknown model.norm 'rsm'; the nearest is 'rms' (known: layer, rms)"),
        (
            {"positions": "ropes"},
            "unknown model.positions 'ropes'; the nearest is 'rope' (known: learned, rope)",
        ),
        ({"mlp": "relu"}, "unknown model.mlp 'relu'; the nearest is 'gelu' (known: gelu, swiglu)"),
        ({"norm_eps": 0.0}, "model.norm_eps = 0.0 must be positive; 1e-5 is usual"),
        ({"rope_theta": 1.0}, "model.rope_theta = 1.0 must be above 1; 10000 is usual"),
        ({"rope_factor": 0.5}, "model.rope_factor = 0.5 must be at least 1; 1 turns the scaling off"),
        (
            {"rope_low_freq_factor": 4.0},
            "model.rope_low_freq_factor = 4.0 must be positive and below model.rope_high_freq_factor = 4.0; "
            "Llama 3 uses 1 and 4",
        ),
    ],
)
def test_every_broken_rule_is_one_sentence(overrides, sentence):
    with pytest.raises(UserError) as error:
        small(**overrides)
    assert str(error.value) == sentence


def test_rope_rules_do_not_bind_learned_positions():
    assert small(head_dim=5, positions="learned").head_dim == 5
