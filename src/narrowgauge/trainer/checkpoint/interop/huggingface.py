"""Folders of Hugging Face transformers: GPT-2, Llama, Mixtral, Qwen2 and Qwen3, in and out.

    config.json                  the architecture and its dimensions (`hf_config.py`)
    model*.safetensors           the weights (`safetensors_reader.py`, `name_map.py`)
    tokenizer.json               the tokenizer
    tokenizer_config.json        the tokenizer's class, the end of a text, the chat template
    chat_template.jinja          that template, if it has a separate file
    hf_quant_config.json         states that ModelOpt quantized the weights, where config.json does not
    generation_config.json       the tokens that begin and end a text; settings of `generate`

(Layout: transformers, `save_pretrained`.) Both directions compute the same logits: see
`tests/checkpoint/interop/test_huggingface.py`.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.checkpoint.interop.hf_config import config_from, to_config
from narrowgauge.trainer.checkpoint.interop.name_map import (
    ExternalModel,
    name_map,
    require_layers,
    require_tensors,
)
from narrowgauge.trainer.checkpoint.interop.quantized_weights import QuantizedFolder, require_readable
from narrowgauge.trainer.checkpoint.interop.safetensors_reader import (
    SHARD_BYTES,
    inside,
    read_json,
    write_json,
    write_tensors,
)
from narrowgauge.trainer.checkpoint.store.manifest import read_bounded
from narrowgauge.trainer.data import Tokenizer, load_tokenizer
from narrowgauge.trainer.models import ModelConfig

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
GENERATION = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
MODELOPT = "hf_quant_config.json"
ADAPTER = "adapter_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
_LARGEST_TEMPLATE = 1 << 20
_HEAD = "lm_head.weight"
# Keys of a tokenizer_config.json that name code or files other than tokenizer.json, the only one exported.
_NOT_KEPT = ("auto_map", "tokenizer_class", "tokenizer_file", "name_or_path")
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Buffers that some versions stored with the weights: masks, and values derived from the configuration.
_NO_WEIGHT = re.compile(r".*\.(attn\.(masked_)?bias|rotary_emb\.inv_freq)")


def read_folder(folder: Path) -> ExternalModel:
    """The model in a folder, with its weights dequantized to float32; nothing in the files is executed."""
    if (folder / ADAPTER).exists():  # transformers would add it to the weights
        raise UserError(
            f"{folder} has an {ADAPTER}, and weights of an adapter (PEFT, LoRA) are not read here; merge it "
            "with merge_and_unload() and save that, or move the adapter's files out to have the weights alone"
        )
    values = read_json(inside(folder, CONFIG))
    config = config_from(values, str(folder / CONFIG))
    weights = QuantizedFolder(folder, _quantization(folder, values))
    require_layers(config, len(weights.file_of), folder)
    stored = {_full_name(name, config): name for name in weights.names if not _NO_WEIGHT.fullmatch(name)}
    pairs = name_map(config)
    require_tensors(stored, pairs, {_HEAD} if config.tied_head else set(), folder)
    tensors = {pair.ours: pair.join(lambda name: weights.read(stored[name]), folder) for pair in pairs}
    is_tied = config.tied_head and _HEAD in stored  # transformers 5 would not tie another head either
    if is_tied and not torch.equal(weights.read(stored[_HEAD]), tensors["embedding.weight"]):
        raise UserError(
            f"{folder} has a {_HEAD!r} that differs from its embedding, but its {CONFIG} ties the two; "
            'write "tie_word_embeddings": false there if the head is to be used, or delete the tensor'
        )
    tokenizer = inside(folder, TOKENIZER) if (folder / TOKENIZER).exists() else None
    settings = special_tokens_of(folder, values)
    return ExternalModel(folder, "hf", config, tensors, weights.precisions, tokenizer, settings)


def _quantization(folder: Path, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """How the weights are quantized: from the values of `config.json`, or from ModelOpt's file."""
    quantization, where = values.get("quantization_config") or {}, folder / CONFIG
    if not quantization and (folder / MODELOPT).exists():
        where = folder / MODELOPT
        quantization = {"quant_method": "modelopt", **read_json(inside(folder, MODELOPT))}
    if quantization:
        require_readable(quantization, str(where))
    return quantization


def special_tokens_of(folder: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in a folder for the tokens that begin and end a text, and for chat: {file name: values}.

    From `config.json`, whose values are given, only these tokens; all of `generation_config.json`;
    `tokenizer_config.json` without the keys that name code or other files. A model that is exported again
    stops at the same tokens as before, however its tokenizer names the end of a document, and keeps its chat
    template. The template is a Jinja program: it is kept as text, and never run here.
    """
    found: dict[str, Any] = {CONFIG: {key: values[key] for key in _SPECIAL_TOKENS if key in values}}
    if (folder / GENERATION).exists():
        found[GENERATION] = read_json(inside(folder, GENERATION))
    settings: dict[str, Any] = {}
    if (folder / TOKENIZER_CONFIG).exists():
        said = read_json(inside(folder, TOKENIZER_CONFIG))
        settings = {key: value for key, value in said.items() if key not in _NOT_KEPT}
    if (folder / CHAT_TEMPLATE).exists():  # transformers reads it first
        path = inside(folder, CHAT_TEMPLATE)
        try:
            settings["chat_template"] = read_bounded(path, _LARGEST_TEMPLATE).decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not a chat template: {error}; fetch it again, or delete it") from None
    return found | ({TOKENIZER_CONFIG: settings} if settings else {})


def write_folder(
    folder: Path,
    config: ModelConfig,
    tensors: Mapping[str, torch.Tensor],
    tokenizer: Path | None,
    dtype: torch.dtype = torch.float32,
    special_tokens: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Fill an empty folder with a model, given in our names, that transformers' `from_pretrained` opens."""
    named = [item for pair in name_map(config) for item in pair.split(tensors[pair.ours])]
    write_tensors(folder, named, dtype, shard_bytes)
    write_settings(folder, to_config(config), tokenizer, dtype, special_tokens)


def write_settings(
    folder: Path,
    values: Mapping[str, Any],
    tokenizer: Path | None,
    dtype: torch.dtype,
    special_tokens: Mapping[str, Any] | None = None,
) -> None:
    """Write everything but the weights: `config.json` from `values`, and the tokenizer with its settings.

    `special_tokens` is the result of `special_tokens_of`; the tokenizer supplies what is missing there.
    """
    kept = special_tokens or {}
    tokens: dict[str, Any] = dict(kept.get(CONFIG, {}))
    if tokenizer is not None:
        loaded = load_tokenizer(tokenizer)
        tokens = tokens_around_a_text(loaded, kept)
        (folder / TOKENIZER).write_text(loaded.to_json(), encoding="utf-8")
        end = tokens["eos_token_id"]
        if type(end) is not int or not 0 <= end < loaded.vocab_size:  # several, or none
            end = loaded.end_of_document
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",  # reads tokenizer.json, and needs no other file
            "eos_token": loaded.library.id_to_token(end),
            "model_max_length": values.get("max_position_embeddings", values.get("n_positions")),
        }
        write_json(folder / TOKENIZER_CONFIG, settings | kept.get(TOKENIZER_CONFIG, {}))
    if generation := kept.get(GENERATION, tokens):
        write_json(folder / GENERATION, generation)
    write_json(folder / CONFIG, {**values, **tokens, "torch_dtype": str(dtype).removeprefix("torch.")})


def tokens_around_a_text(tokenizer: Tokenizer, special_tokens: Mapping[str, Any]) -> dict[str, Any]:
    """The ids that begin and end a text: from `special_tokens_of`, else from the tokenizer."""
    begin = tokenizer.library.encode("", add_special_tokens=True).ids
    end = tokenizer.end_of_document
    return {"bos_token_id": (begin or [end])[0], "eos_token_id": end} | special_tokens.get(CONFIG, {})


def _full_name(name: str, config: ModelConfig) -> str:
    """The name in the full model; a folder of the model without its head omits the prefix."""
    prefix = "transformer." if config.positions == "learned" else "model."
    return name if name.startswith((prefix, "lm_head.")) else prefix + name
