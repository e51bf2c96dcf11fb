"""Folders that hold more than one answer: what transformers reads is read, or nothing."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from checkpoint.interop.models import ours_from
from checkpoint.interop.test_huggingface import IDS
from narrowgauge.checkpoint.interop.hf_config import config_from
from narrowgauge.checkpoint.interop.huggingface import read_folder
from narrowgauge.checkpoint.interop.safetensors_reader import INDEX
from narrowgauge.errors import UserError

LEAST = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
LEAST |= {"vocab_size": 67}
FAMILIES = [LlamaConfig, MistralConfig, MixtralConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig]


def llama():
    return LlamaForCausalLM(LlamaConfig(**LEAST)).eval()


def logits_of(folder):
    return ours_from(read_folder(folder))(IDS)


def test_a_head_of_its_own_is_not_dropped_for_a_configuration_that_ties_it(tmp_path):
    """transformers 5 takes both tensors then; the embedding alone would give other logits."""
    model = llama()
    model.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"tie_word_embeddings": True}))
    with pytest.raises(UserError, match=r"'lm_head\.weight' that differs from its embedding"):
        read_folder(tmp_path)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(values | {"tie_word_embeddings": True}))
    assert read_folder(tmp_path).config.tied_head


@torch.no_grad()
def test_of_parts_and_one_file_the_file_is_read_as_in_transformers(tmp_path):
    """`save_pretrained` into a folder of parts leaves their index; other tools leave the parts as well."""
    llama().save_pretrained(tmp_path, max_shard_size="30KB")
    newer = llama()
    save_file(newer.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert (tmp_path / INDEX).exists()
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)(IDS).logits
    assert (logits_of(tmp_path) - expected).abs().max() < 1e-5
    newer.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("model-*"))
    assert (logits_of(tmp_path) - expected).abs().max() < 1e-5


def test_an_adapter_beside_the_weights_is_refused(tmp_path):
    """transformers adds it to the weights, so that the weights alone are another model."""
    llama().save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(UserError, match=r"an adapter .* are not read here; merge it"):
        read_folder(tmp_path)


@pytest.mark.parametrize("config", FAMILIES)
def test_a_key_that_is_missing_has_the_default_of_transformers(config):
    values = LEAST | {"hidden_size": 128, "num_attention_heads": 32}
    values |= {"sliding_window": None} if config is MistralConfig else {}
    theirs = config(**values)
    ours = config_from(values | {"model_type": config.model_type}, "config.json")
    assert ours.kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or ours.dim // ours.heads)
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.max_sequence_length == theirs.max_position_embeddings
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.tied_head == theirs.tie_word_embeddings
    if ours.experts:
        assert (ours.experts, ours.experts_per_token) == (theirs.num_experts, theirs.num_experts_per_tok)
