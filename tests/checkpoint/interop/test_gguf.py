"""GGUF files: the package of llama.cpp decodes what the run multiplies, under every recipe."""

import json

import numpy as np
import pytest
import torch
from tokenizers import Regex, pre_tokenizers

from narrowgauge.checkpoint.interop.gguf.blocks import code_rows, plain_rows, type_of, values_of
from narrowgauge.checkpoint.interop.gguf.container import read_gguf
from narrowgauge.checkpoint.interop.gguf.model import (
    expected_values,
    gguf_map,
    read_gguf_model,
    write_gguf_model,
)
from narrowgauge.checkpoint.interop.gguf.tokenizer import tokenizer_keys
from narrowgauge.checkpoint.interop.read_back import require_read_back
from narrowgauge.checkpoint.lint.lint import lint
from narrowgauge.data import bytes_tokenizer, load_tokenizer, train_bpe
from narrowgauge.data.tokenization.formats import PATTERNS
from narrowgauge.data.tokenization.tokenizer import ids_tokenizer
from narrowgauge.errors import UserError
from narrowgauge.models import Transformer, initialize, model_config
from narrowgauge.nn import convert
from narrowgauge.quantization import cast, quantize
from narrowgauge.recipes import recipe_names

SIZES = {"dim": 128, "layers": 3, "heads": 4, "kv_heads": 2, "ffn_dim": 64, "vocab_size": 160}
TYPE = {"bf16": "BF16", "fp32": "F32", "mxfp4": "MXFP4", "nvfp4": "NVFP4", "mxint8": "Q8_0", "fp8": "F32"}
TYPE |= {"mxfp4-amd": "MXFP4", "mxfp8": "BF16", "fp8-row": "BF16"}
ROTATED = ("quartet",)
FAMILIES = {
    "gpt2": {
        **{"positions": "learned", "norm": "layer", "mlp": "gelu", "bias": True, "kv_heads": 4},
        "tied_head": True,
    },
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True, "head_dim": 64},
    "qwen3moe": {"qk_norm": True, "experts": 4},
    "llama with experts": {"experts": 4},
    "llama with biases": {"bias": True},
    "llama with scaled positions": {"rope_factor": 8.0, "rope_original_positions": 16, "tied_head": True},
}


def written(path, recipe, dtype=None, **sizes):
    """A model under a recipe, in a file; its values that the file should hold, and the remarks."""
    model = Transformer(model_config("debug", **SIZES | sizes))
    initialize(model, 0)
    for vector in (p for p in model.parameters() if p.ndim == 1):
        vector.data += torch.linspace(-0.1, 0.1, len(vector))
    convert(model, recipe)
    names = dict(model.named_parameters(remove_duplicate=False))
    weights = {key: t.float() for key, t in model.state_dict().items() if key in names}
    remarks = write_gguf_model(path, model, weights, None, dtype)
    return model.config, expected_values(model, weights, dtype), remarks


def by_the_package(path):
    """Every tensor of a file as float32, times its tensor scale, as the package of llama.cpp decodes it."""
    reason = "gguf, the package of llama.cpp, decodes the file, and is not installed"
    reader = pytest.importorskip("gguf", reason=reason).GGUFReader(path)
    from gguf.quants import dequantize

    found = {t.name: dequantize(t.data, t.tensor_type) for t in reader.tensors}
    for name in [name for name in found if name.endswith(".scale")]:
        scale, weight = found[name], name.removesuffix("scale") + "weight"
        found[weight] = found[weight] * scale.reshape(-1, *[1] * (found[weight].ndim - 1))
    return found


@pytest.mark.tier("thorough", keep=("mxfp4", "nvfp4", "mxint8"))
@pytest.mark.parametrize("recipe", TYPE)
def test_the_package_decodes_what_the_run_multiplies(tmp_path, recipe):
    config, expected, remarks = written(tmp_path / "model.gguf", recipe)
    theirs = by_the_package(tmp_path / "model.gguf")
    for pair in gguf_map(config):
        parts = [torch.from_numpy(theirs[name].astype(np.float32)) for name in pair.theirs]
        for i, heads in ((0, config.heads), (1, config.kv_heads)) if pair.ours.endswith("qkv.weight") else ():
            # transformers keeps the halves of a head apart, llama.cpp alternates between them
            halves = parts[i].reshape(heads, config.head_dim // 2, 2, config.dim).transpose(1, 2)
            parts[i] = halves.reshape(parts[i].shape)
        assert torch.equal(torch.cat(parts), expected[pair.ours]), pair.ours
    kinds = {t.name: t.type for t in read_gguf(tmp_path / "model.gguf").tensors}
    assert {kinds[n] for n in kinds if n.startswith("blk.0.") and "norm" not in n} - {"F32"} <= {TYPE[recipe]}
    assert kinds["blk.1.attn_output.weight"] == TYPE[recipe]
    assert bool(remarks) == (recipe in ("fp8", "mxfp8", "fp8-row"))
    assert not lint(tmp_path / "model.gguf").findings


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("recipe", recipe_names())
def test_every_recipe_is_exact_or_refused(tmp_path, recipe):
    if recipe in ROTATED:
        with pytest.raises(UserError, match="Hadamard"):
            written(tmp_path / "model.gguf", recipe, layers=2)
        assert not list(tmp_path.iterdir())
        return
    config, expected, _ = written(tmp_path / "model.gguf", recipe, layers=2)
    require_read_back(read_gguf_model(tmp_path / "model.gguf", config), expected)


@pytest.mark.tier("thorough", keep=("gpt2-nvfp4", "llama with experts-nvfp4"))
@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_read_back(tmp_path, family, recipe):
    config, expected, remarks = written(tmp_path / "model.gguf", recipe, **FAMILIES[family])
    require_read_back(read_gguf_model(tmp_path / "model.gguf", config), expected)
    file = read_gguf(tmp_path / "model.gguf")
    assert file.metadata["general.architecture"] == family.split()[0]
    # llama.cpp multiplies by no tensor scale in these MLPs, or aborts.
    has_no_scales = family in ("gpt2", "qwen2", "llama with biases")
    assert bool(remarks) == (has_no_scales and recipe == "nvfp4")
    assert any(t.name.endswith(".scale") for t in file.tensors) == (recipe == "nvfp4" and not has_no_scales)


def test_a_dtype_is_that_of_weights_without_a_narrow_cast(tmp_path):
    config, expected, _ = written(tmp_path / "model.gguf", "mxfp4", torch.bfloat16, tied_head=True)
    require_read_back(read_gguf_model(tmp_path / "model.gguf", config), expected)
    kinds = {t.name: t.type for t in read_gguf(tmp_path / "model.gguf").tensors}
    assert kinds["token_embd.weight"] == "BF16"
    assert kinds["output_norm.weight"] == "F32"
    assert "output.weight" not in kinds  # equal to the embedding, once both are bf16


def test_models_that_llama_cpp_computes_otherwise_are_refused(tmp_path):
    for sizes, words in [
        ({"qk_norm": True, "experts": 4, "norm_topk_prob": False}, "norm_topk_prob"),
        ({"qk_norm": True, "rope_factor": 8.0}, "rope_factor"),
    ]:
        with pytest.raises(UserError, match=words):
            written(tmp_path / "model.gguf", "bf16", **sizes)
    assert not list(tmp_path.iterdir())


def test_codes_that_a_type_cannot_hold_have_none():
    assert type_of(cast("mxfp4"), 128) == "MXFP4"
    assert type_of(cast("nvfp4-2d"), 128) == "NVFP4"
    assert type_of(cast("nvfp4"), 48) is None  # a block of ggml has 64
    assert type_of(cast("mxfp8"), 128) is None
    small, large = torch.full((1, 32), 2.0**-30), torch.full((1, 32), 2.0**30)
    for x in (small, large):
        q = quantize(x, cast("mxint8"), -1)
        assert code_rows(q, "Q8_0") is None  # fp16 has no such power of two
    q = quantize(torch.zeros(1, 32), cast("mxint8"), -1)
    assert values_of(code_rows(q, "Q8_0")).eq(0).all()


def test_plain_values_are_stored_exactly():
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    for values, kind in ((x, "F32"), (x.bfloat16().float(), "BF16"), (x[0].bfloat16().float(), "F32")):
        rows = plain_rows(values)
        assert rows.type == kind
        assert torch.equal(values_of(rows), values)
    assert torch.equal(values_of(plain_rows(x, torch.float16)), x.half().float())


def test_a_tokenizer_keeps_its_tokens_and_its_rule():
    bpe = train_bpe(["many words to learn from, many more words"] * 30, 280)
    for tokenizer in (bytes_tokenizer(), bpe):
        keys = tokenizer_keys(tokenizer, 300, {"eos_token_id": [tokenizer.end_of_document]}, "{{ 1 }}")
        vocabulary = tokenizer.library.get_vocab(with_added_tokens=True)
        assert all(keys["tokenizer.ggml.tokens"][i] == token for token, i in vocabulary.items())
        assert keys["tokenizer.ggml.tokens"][299] == "[PAD299]"
        assert keys["tokenizer.ggml.token_type"][tokenizer.end_of_document] == 3
        assert keys["tokenizer.ggml.eos_token_id"] == tokenizer.end_of_document
        assert keys["tokenizer.ggml.pre"] == "gpt-2"
        assert keys["tokenizer.chat_template"] == "{{ 1 }}"
    merges = [" ".join(pair) for pair in json.loads(bpe.to_json())["model"]["merges"]]
    assert tokenizer_keys(bpe, 300, {})["tokenizer.ggml.merges"] == merges
    assert tokenizer_keys(None, 300, {}) == {"tokenizer.ggml.model": "none"}
    assert tokenizer_keys(ids_tokenizer(300, 299), 300, {}) == {"tokenizer.ggml.model": "none"}


def test_a_rule_that_gguf_does_not_name_is_refused(tmp_path):
    def cut_by(pattern):
        bpe = train_bpe(["many words to learn from"] * 30, 270)
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        bpe.library.pre_tokenizer = pre_tokenizers.Sequence([split, last])
        bpe.save(tmp_path / "tokenizer.json")
        return tokenizer_keys(load_tokenizer(tmp_path / "tokenizer.json"), 300, {})

    for name, pattern in PATTERNS.items():
        assert cut_by(pattern)["tokenizer.ggml.pre"] == name
    with pytest.raises(UserError, match="would read other ids"):
        cut_by(r"\p{N}|\s+|\S+")
