"""Folders of Hugging Face transformers: GPT-2, Llama and Qwen2, in and out.

    config.json                  the architecture and its dimensions   (`families.py`)
    model*.safetensors           the weights                  (`tensor_files.py`, `counterparts.py`)
    tokenizer.json               the tokenizer, with
    tokenizer_config.json        the class that reads it and the end of a text
    generation_config.json       the tokens that begin and end a text

(Layout: transformers, `save_pretrained`.) Both directions compute the same logits: see
`tests/checkpoint/interop/test_huggingface.py`.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from narrowgauge.checkpoint.interop.external_model import ExternalModel, external_model, require_layers
from narrowgauge.checkpoint.interop.hf_config import config_from, to_config
from narrowgauge.checkpoint.interop.name_map import name_map
from narrowgauge.checkpoint.interop.safetensors_reader import (
    SHARD_BYTES,
    TensorFolder,
    inside,
    read_json,
    refuse_pickles,
    write_tensors,
)
from narrowgauge.data import load_tokenizer
from narrowgauge.errors import UserError
from narrowgauge.models import ModelConfig

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
# Buffers that some versions stored beside the weights: masks, and what follows from the configuration.
_NO_WEIGHT = re.compile(r".*\.(attn\.(masked_)?bias|rotary_emb\.inv_freq)")


def is_folder(path: Path) -> bool:
    """Whether a path is a folder of this kind."""
    return (path / CONFIG).is_file()


def read_folder(folder: Path) -> ExternalModel:
    """The model in a folder, its weights as float32.

    Raises `UserError` for a family, an option or a file that is not read; nothing in the files is executed.
    """
    config = config_from(read_json(inside(folder, CONFIG)), str(folder / CONFIG))
    with TensorFolder(folder) as there:
        require_layers(config, len(there.file_of), folder)
        stored = {_full_name(name, config): name for name in there.file_of if not _NO_WEIGHT.fullmatch(name)}
        counterparts = name_map(config)
        needed = {name for counterpart in counterparts for name in counterpart.theirs}
        if missing := sorted(needed - stored.keys()):
            raise UserError(
                f"{folder} has no tensor {missing[0]!r}, which its {CONFIG} asks for; fetch it again"
            )
        extra = stored.keys() - needed - ({"lm_head.weight"} if config.tied_head else set())
        if extra:
            raise UserError(
                f"{folder} has a tensor {min(extra)!r}, for which its {CONFIG} has no place; "
                "give a plain language model"
            )
        tensors = {
            counterpart.ours: counterpart.join(lambda name: there.read(stored[name]))
            for counterpart in counterparts
        }
    tokenizer = inside(folder, TOKENIZER) if (folder / TOKENIZER).exists() else None
    return external_model("hf", config, tensors, folder, tokenizer)


def write_folder(
    folder: Path,
    config: ModelConfig,
    tensors: Mapping[str, torch.Tensor],
    tokenizer: Path | None,
    dtype: torch.dtype = torch.float32,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Fill an empty folder with a model in our names that transformers opens with `from_pretrained`."""
    named = [
        item for counterpart in name_map(config) for item in counterpart.split(tensors[counterpart.ours])
    ]
    values = to_config(config)
    write_tensors(folder, named, dtype, shard_bytes)
    write_settings(folder, values, tokenizer, dtype)


def write_settings(
    folder: Path, values: Mapping[str, Any], tokenizer: Path | None, dtype: torch.dtype
) -> None:
    """Everything but the weights: `config.json` of some values, and the tokenizer with its settings."""
    tokens: dict[str, Any] = {}
    if tokenizer is not None:
        ours = load_tokenizer(tokenizer)
        begin = ours.library.encode("", add_special_tokens=True).ids
        tokens = {"bos_token_id": (begin or [ours.end_of_document])[0], "eos_token_id": ours.end_of_document}
        (folder / TOKENIZER).write_text(ours.to_json(), encoding="utf-8")
        end = ours.library.id_to_token(ours.end_of_document)
        length = values.get("max_position_embeddings", values.get("n_positions"))
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": end,
            "model_max_length": length,
        }
        _write_json(folder / "tokenizer_config.json", settings)
        _write_json(folder / "generation_config.json", tokens)
    _write_json(folder / CONFIG, {**values, **tokens, "torch_dtype": str(dtype).removeprefix("torch.")})


def refuse_other_folder(path: Path) -> UserError:
    """What is wrong with a folder that nobody recognises."""
    refuse_pickles(path)
    return UserError(
        f"{path} is no model: it has neither {CONFIG} (Hugging Face) nor megatron.toml nor config.toml "
        "(a run); name a folder that has one of them, or an llm.c model file"
    )


def _full_name(name: str, config: ModelConfig) -> str:
    """The name in the whole model; a folder of the model without its head leaves the prefix out."""
    prefix = "transformer." if config.positions == "learned" else "model."
    return name if name.startswith((prefix, "lm_head.")) else prefix + name


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
