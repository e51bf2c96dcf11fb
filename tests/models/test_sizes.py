import pytest

from narrowgauge.errors import UserError
from narrowgauge.models import model_config, model_names
from narrowgauge.models.sizes import ALIASES, name_of


def test_every_name_is_a_valid_configuration():
    assert {"debug", "gpt2-debug", "gpt2-124m", "llama3-1b"} <= set(model_names())
    for name in model_names():
        assert model_config(name).layers > 0


@pytest.mark.parametrize("name", ["debug", "gpt2-debug"])
def test_debug_models_fit_every_block_shape(name):
    c = model_config(name)
    widths = [c.dim, c.ffn_dim, c.heads * c.head_dim, c.kv_heads * c.head_dim, c.vocab_size]
    assert all(width % 128 == 0 for width in widths)


def test_overrides_replace_and_derived_keys_follow():
    c = model_config("gpt2-124m", heads=6, dim=384)
    assert (c.heads, c.kv_heads, c.head_dim, c.ffn_dim) == (6, 6, 64, 3072)
    assert model_config("gpt2-124m").heads == 12


def test_unknown_name_and_key_name_the_nearest():
    with pytest.raises(UserError, match=r"^unknown model 'lama3-1b'; the nearest is 'llama3-1b' \(known: "):
        model_config("lama3-1b")
    with pytest.raises(UserError, match=r"^unknown model key 'layer'; the nearest is 'layers' \(known: "):
        model_config("debug", layer=3)
    with pytest.raises(UserError, match=r"^model\.dim = 250 must be a multiple of model\.heads = 4"):
        model_config("debug", dim=250)


@pytest.mark.parametrize("name", model_names())
def test_a_configuration_knows_its_name(name):
    same = name_of(model_config(name, max_sequence_length=77, initial_std=0.5))
    # GPT-3 of 345 million is GPT-2 of 350 million, but for the data.
    assert same == ("gpt2-350m" if name == "gpt3-345m" else name)
    assert name_of(model_config(name, ffn_dim=77)) == "custom"


def test_a_custom_model_is_all_its_dimensions():
    given = {"dim": 64, "layers": 2, "heads": 4, "ffn_dim": 96, "vocab_size": 61, "max_sequence_length": 32}
    assert model_config("custom", **given).head_dim == 16
    with pytest.raises(
        UserError, match=r"^a model called 'custom' .* model\.dim is not given; give dim, layers"
    ):
        model_config("custom")


def test_other_names_of_the_same_models():
    for other, name in ALIASES.items():
        assert model_config(other) == model_config(name)
        assert other not in model_names()
