import pytest

from narrowgauge.errors import UserError
from narrowgauge.models import model_config, model_names


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
