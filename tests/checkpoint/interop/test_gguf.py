"""GGUF files: the package of llama.cpp and import read what the run multiplies, or the file is refused."""

import dataclasses
import json

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from tokenizers import Regex, pre_tokenizers

from checkpoint.interop.models import export, model_under, refused, weights_of
from narrowgauge.quantization import cast, quantize
from narrowgauge.recipes import recipe_names
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.checkpoint.interop.external_model import is_external_model, read_external_model
from narrowgauge.trainer.checkpoint.interop.gguf_file import (
    StoredRows,
    block_of,
    code_rows,
    read_gguf,
    settings_of,
    tokenizer_keys,
    tokenizer_of,
    type_of,
    values_of,
    write_gguf,
)
from narrowgauge.trainer.checkpoint.interop.gguf_model import expected_values, gguf_map, read_gguf_model
from narrowgauge.trainer.checkpoint.interop.read_back import require_read_back
from narrowgauge.trainer.data import bytes_tokenizer, ids_tokenizer, load_tokenizer, train_bpe
from narrowgauge.trainer.data.tokenization.formats import PATTERNS

SIZES = {"layers": 3, "ffn_dim": 64}
TYPE = {"bf16": "BF16", "fp32": "F32", "mxfp4": "MXFP4", "nvfp4": "NVFP4", "mxint8": "Q8_0", "fp8": "F32"}
TYPE |= {"mxfp4-amd": "MXFP4", "mxfp8": "BF16", "fp8-row": "BF16"}
ROTATED = ("quartet",)
GPT2 = {"positions": "learned", "norm": "layer", "mlp": "gelu", "bias": True, "tied_head": True}
GPT2["kv_heads"] = 4
FAMILIES = {
    "gpt2": GPT2,
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True, "head_dim": 64},
    "qwen3moe": {"qk_norm": True, "experts": 4},
    "llama with experts": {"experts": 4},
    "llama with biases": {"bias": True},
    "llama with scaled positions": {"rope_factor": 8.0, "rope_original_positions": 16, "tied_head": True},
}


def written(path, recipe, dtype=None, **sizes):
    """A model under a recipe, in a file; its values that the file should hold, and the remarks."""
    model = model_under(recipe, **SIZES | sizes)
    expected = expected_values(model, weights_of(model), dtype)
    return model.config, expected, export("gguf", path.parent, model, dtype)


def by_the_package(path):
    """Every tensor of a file as float32, times its tensor scale, as the package of llama.cpp decodes it."""
    found = {t.name: dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}
    for name in [name for name in found if name.endswith(".scale")]:
        scale, weight = found[name], name.removesuffix("scale") + "weight"
        found[weight] = found[weight] * scale.reshape(-1, *[1] * (found[weight].ndim - 1))
    return found


@pytest.mark.tier("thorough", keep=("mxfp4", "nvfp4", "mxint8"))
@pytest.mark.parametrize("recipe", [*TYPE, *sorted({*recipe_names()} - TYPE.keys())])
def test_the_package_and_import_read_what_the_run_multiplies(tmp_path, recipe):
    path = tmp_path / "model.gguf"
    if recipe in ROTATED:
        with pytest.raises(UserError, match="Hadamard"):
            written(path, recipe)
        assert not list(tmp_path.iterdir())
        return
    config, expected, remarks = written(path, recipe)
    require_read_back(read_gguf_model(read_gguf(path), config), expected)
    theirs = by_the_package(path)
    for pair in gguf_map(config):
        parts = [torch.from_numpy(theirs[name].astype(np.float32)) for name in pair.theirs]
        for i, heads in ((0, config.heads), (1, config.kv_heads)) if pair.ours.endswith("qkv.weight") else ():
            # transformers keeps the halves of a head apart, llama.cpp alternates between them
            halves = parts[i].reshape(heads, config.head_dim // 2, 2, config.dim).transpose(1, 2)
            parts[i] = halves.reshape(parts[i].shape)
        assert torch.equal(torch.cat(parts), expected[pair.ours]), pair.ours
    if recipe in TYPE:
        kinds = {name: t.type for name, t in read_gguf(path).tensors.items()}
        weights = {kind for name, kind in kinds.items() if name.startswith("blk.0.") and "norm" not in name}
        assert weights - {"F32"} <= {TYPE[recipe]}
        assert kinds["blk.1.attn_output.weight"] == TYPE[recipe]
        assert bool(remarks) == (recipe in ("fp8", "mxfp8", "fp8-row"))


#: Every family, and every type that is written.
ALONE = [
    *(("gpt2", "nvfp4"), ("gpt2", "bf16"), ("qwen2", "fp32"), ("qwen3", "mxint8"), ("qwen3moe", "mxfp4")),
    *(("llama with experts", "nvfp4"), ("llama with biases", "nvfp4")),
    ("llama with scaled positions", "mxfp4"),
]


@pytest.mark.tier("thorough", keep=ALONE[-3:])
@pytest.mark.parametrize(("family", "recipe"), ALONE)
def test_a_file_alone_gives_the_model_back(tmp_path, family, recipe):
    """Configuration and weights, bit for bit, of every family in every type that is written."""
    path = tmp_path / "model.gguf"
    config, expected, remarks = written(path, recipe, **FAMILIES[family])
    file = read_gguf(path)
    assert file.metadata["general.architecture"] == family.split()[0]
    # llama.cpp multiplies by no tensor scale in these MLPs, or aborts.
    has_no_scales = family in ("gpt2", "qwen2", "llama with biases")
    assert bool(remarks) == (has_no_scales and recipe == "nvfp4")
    assert any(name.endswith(".scale") for name in file.tensors) == (recipe == "nvfp4" and not has_no_scales)
    found = read_external_model(path)
    assert found.config == config
    if config.tied_head:  # the file also has what the recipe's head multiplies, for servers
        expected["head.weight"] = expected["embedding.weight"]
    assert found.tensors.keys() == expected.keys() | {"head.weight"}
    assert all(torch.equal(found.tensors[name], weight) for name, weight in expected.items())
    assert is_external_model(tmp_path)
    assert found.tokenizer is None


def test_a_dtype_is_that_of_weights_without_a_narrow_cast(tmp_path):
    config, expected, _ = written(tmp_path / "model.gguf", "mxfp4", torch.bfloat16, tied_head=True)
    require_read_back(read_gguf_model(read_gguf(tmp_path / "model.gguf"), config), expected)
    kinds = {name: t.type for name, t in read_gguf(tmp_path / "model.gguf").tensors.items()}
    assert kinds["token_embd.weight"] == "BF16"
    assert kinds["output_norm.weight"] == "F32"
    assert "output.weight" not in kinds  # equal to the embedding, once both are bf16
    other = put("output.weight", "BF16", (160, 128), np.ones((160, 256), np.uint8))
    found = read_external_model(changed(tmp_path / "model.gguf", other))
    assert found.config == dataclasses.replace(config, tied_head=False), "a head of other values is not tied"


def test_codes_that_a_type_cannot_hold_have_none():
    assert type_of(cast("nvfp4"), 48) is None  # a block of ggml has 64
    for power in (-30, 30):  # fp16 has no such power of two
        q = quantize(torch.full((1, 32), 2.0**power), cast("mxint8"), -1)
        assert code_rows(q, "Q8_0") is None
    q = quantize(torch.zeros(1, 32), cast("mxint8"), -1)
    assert values_of(code_rows(q, "Q8_0")).eq(0).all()


@pytest.mark.tier("thorough", keep=("Q4_K", "Q4_0", "MXFP4", "Q8_K"))
@pytest.mark.parametrize("kind", gguf.GGMLQuantizationType.__members__)
def test_blocks_of_the_package_are_read_as_it_decodes_them(tmp_path, kind):
    draw, number = np.random.default_rng(0), gguf.GGMLQuantizationType[kind]
    try:
        data = gguf.quants.quantize(draw.normal(size=(128, 256)).astype(np.float32), number)
    except NotImplementedError:  # any bytes without an infinite fp16
        block, size = block_of(kind)
        data = draw.integers(256, size=(128, 256 // block * size)).astype(np.uint8) & 0x3B
    written(tmp_path / "model.gguf", "fp32", layers=1, ffn_dim=256)
    how = put("blk.0.ffn_down.weight", kind, (128, 256), data.reshape(-1).view(np.uint8))
    path = changed(tmp_path / "model.gguf", how)
    try:
        values = torch.from_numpy(dequantize(data.view(np.uint8), number).astype(np.float32))
    except NotImplementedError:
        refused(path, f"stored as {kind}, which gguf does not decode")
        return
    assert torch.equal(read_external_model(path).tensors["blocks.0.down.weight"], values)


TEXT = "Many words, 12345 of them;  we'll see\n\n\tünï 東京 <|endoftext|>"


def cut_by(tmp_path, pattern):
    """A tokenizer of bytes and merges that cuts its text by a pattern."""
    bpe = train_bpe([TEXT + " more words that we see"] * 30, 300)
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.library.pre_tokenizer = pre_tokenizers.Sequence([split, last])
    bpe.save(tmp_path / "tokenizer.json")
    return load_tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("rule", PATTERNS)
def test_the_keys_of_a_tokenizer_hold_and_give_it_back(tmp_path, rule):
    bpe = cut_by(tmp_path, PATTERNS[rule])
    settings = {"tokenizer_config.json": {"chat_template": "{{ 1 }}"}}
    keys = tokenizer_keys(bpe, 310, settings)
    vocabulary, tokens = bpe.library.get_vocab(with_added_tokens=True), keys["tokenizer.ggml.tokens"]
    assert all(tokens[i] == token for token, i in vocabulary.items())
    assert tokens[309] == "[PAD309]"
    assert keys["tokenizer.ggml.token_type"][bpe.end_of_document] == 3
    assert keys["tokenizer.ggml.eos_token_id"] == bpe.end_of_document
    assert keys["tokenizer.ggml.pre"] == rule
    merges = json.loads(bpe.to_json())["model"]["merges"]
    assert keys["tokenizer.ggml.merges"] == [" ".join(pair) for pair in merges]
    back = tokenizer_of(keys)
    assert back.encode(TEXT) == bpe.encode(TEXT)
    assert (back.end_of_document, back.vocab_size) == (bpe.end_of_document, bpe.vocab_size)
    ends = dict.fromkeys(("bos_token_id", "eos_token_id"), bpe.end_of_document)
    assert settings_of(keys) == settings | {"config.json": ends}


def test_other_tokenizers_are_bytes_none_or_refused(tmp_path):
    plain = tokenizer_keys(bytes_tokenizer(), 300, {})
    assert tokenizer_of(plain).is_bytes
    for keys in (plain, tokenizer_keys(train_bpe([TEXT] * 30, 280), 300, {})):
        assert keys["tokenizer.ggml.pre"] == "gpt-2"
    for none in (None, ids_tokenizer(300, 299)):
        assert tokenizer_keys(none, 300, {}) == {"tokenizer.ggml.model": "none"}
    for model in ("none", "llama"):  # SentencePiece
        assert tokenizer_of({"tokenizer.ggml.model": model}) is None
    assert tokenizer_of({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "other"}) is None
    with pytest.raises(UserError, match="would read other ids"):
        tokenizer_keys(cut_by(tmp_path, r"\p{N}|\s+|\S+"), 300, {})


def changed(path, how):
    """The file with its keys and tensors changed."""
    file = read_gguf(path)
    metadata, tensors = dict(file.metadata), dict(file.tensors)
    how(metadata, tensors)
    out = path.with_name("changed.gguf")
    out.unlink(missing_ok=True)
    write_gguf(out, metadata, tensors)
    return out


def put(name, kind, shape, data):
    return lambda m, t: t.update({name: StoredRows(kind, data, shape)})


def renamed(to):
    return lambda m, t: t.update({to: t.pop("output_norm.weight")})


def key(name, value):
    return lambda m, t: m.update({name: value})


INFINITE = np.full(128, np.inf, np.float32).view(np.uint8)
LOST = [
    (key("general.architecture", "gemma"), "unknown architecture"),
    (key("llama.rope.scaling.type", "yarn"), "scaled by 'yarn'"),
    (key("llama.attention.value_length", 16), "has one width"),
    (key("llama.block_count", 10**6), "1000000 layers"),
    (key("llama.attention.head_count", [4, 4]), "one integer"),
    (renamed("blk.0.more.weight"), "has no tensor 'output_norm"),
    (put("output_norm.weight", "F32", (128,), INFINITE), "is not finite"),
    (put("rope_freqs.weight", "F32", (128,), INFINITE), "not the scaling"),
]
#: Models that llama.cpp computes otherwise.
OTHERWISE = [
    ({"qk_norm": True, "experts": 4, "norm_topk_prob": False}, "norm_topk_prob"),
    ({"qk_norm": True, "rope_factor": 8.0}, "rope_factor"),
]


def test_what_would_be_lost_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    for sizes, words in OTHERWISE:
        with pytest.raises(UserError, match=words):
            written(path, "bf16", **sizes)
    assert not list(tmp_path.iterdir())
    written(path, "bf16", layers=1)
    for how, words in LOST:
        refused(changed(path, how), words)


@pytest.mark.tier("thorough")
def test_a_header_with_sizes_that_no_file_has_is_refused(tmp_path):
    """Sizes are checked before memory is allocated: tensors, keys, a text, lists; and half a file."""
    path, huge = tmp_path / "model.gguf", (2**62).to_bytes(8, "little")
    written(path, "bf16", layers=1)
    data = path.read_bytes()
    key, norm = data.index(b"llama.context_length") + 20, data.index(b"output_norm.weight") + 18
    patches = [(8, huge), (16, huge), (24, huge), (key, b"\x08\0\0\0" + huge)]
    patches += [(key, b"\x09\0\0\0" + kind + b"\0\0\0" + huge) for kind in (b"\x00", b"\x08", b"\x09")]
    patches += [(norm + 4, huge), (norm, b"\xff\xff\xff\xff"), (norm + 16, huge), (norm + 12, b"\x63")]
    for at, patch in [(len(data) // 2, b""), *patches]:
        path.write_bytes(data[:at] + patch + data[at + len(patch) :] * bool(patch))
        refused(path, "model.gguf cannot be read: ", "; fetch it again")
