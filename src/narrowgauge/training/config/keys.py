"""Descriptions of the keys of a configuration: meaning, default and form of the value.

Help and error messages use them.
"""

from collections.abc import Iterable, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from narrowgauge.recipes import BACKENDS
from narrowgauge.recipes.places import COMPUTE, GROUPS, PLACES
from narrowgauge.training.config.schema import Also, Section
from narrowgauge.training.config.synonyms import Key

# The values that keys of type text take.
_TEXTS = {
    "model.name": "NAME",
    "model.weights": "RUN",
    "data.source": "SOURCE",
    "data.tokenizer": "bytes|bpe-N|FILE",
    "training.device": "auto|cpu|cuda",
    "training.memory_limit": "SIZE",
    "recipe.name": "NAME|FILE",
    "recipe.backend": "|".join(BACKENDS),
}
# Descriptions of a model's dimensions and choices; their defaults come from the named size.
_OF_THE_MODEL = {
    "dim": "width of the residual stream",
    "layers": "number of blocks",
    "heads": "query heads",
    "kv_heads": "key and value heads, each shared by heads / kv_heads query heads; 0: heads",
    "head_dim": "width of one head; 0: dim / heads",
    "ffn_dim": "width inside the MLP, or inside each expert",
    "vocab_size": "rows of the embedding and of the output head",
    "max_sequence_length": "the longest sequence, in tokens, that the model takes",
    "positions": "as in GPT-2, or as in Llama",
    "rope_theta": "base of the rotary frequencies",
    "rope_factor": "Llama 3.1 scaling: how far the slow frequencies are stretched; 1: off",
    "rope_low_freq_factor": "fewer turns than this in the original context: stretched fully",
    "rope_high_freq_factor": "more turns than this: left alone; in between: interpolated",
    "rope_original_positions": "the context that the frequencies were first trained on",
    "norm": "LayerNorm or RMSNorm",
    "norm_eps": "added to the variance",
    "mlp": "as in GPT-2, or as in Llama",
    "bias": "of the linear layers and of LayerNorm",
    "qkv_bias": "of the query, key and value projection; else as bias",
    "experts": "MLPs of a block, of which each token passes through a few; 0: one MLP for all",
    "experts_per_token": "experts that a token passes through",
    "norm_topk_prob": "whether the weights of a token's experts sum to one",
    "tied_head": "whether the output head shares the embedding's weight",
    "dropout": "in training, of embedding, attention and MLP: share of the elements (0.0)",
    "attention_dropout": "in training, of attention's probabilities, without its fused kernels (0.0)",
    "qk_norm": "RMSNorm over each head of queries and keys, as in Qwen3 (False)",
    "initial_std": "standard deviation of weights before training; 0: one for each role of a weight",
}


def keys_of(sections: Mapping[str, type[Section]]) -> dict[str, Key]:
    """Every `section.key` of these sections; the places of a recipe are keys of its section."""
    keys: dict[str, Key] = {}
    for section, kind in sections.items():
        for name, field in kind.model_fields.items():
            if (section, name) == ("recipe", "places"):
                keys |= _place_keys()
            else:
                key = f"{section}.{name}"
                takes = _TEXTS.get(key) or _takes(field.annotation)
                words = _OF_THE_MODEL.get(name) if section == "model" else None
                alias = next((str(also) for also in field.metadata if isinstance(also, Also)), "")
                keys[key] = Key(words or str(field.description), _default(field), takes, alias)
    return keys


def _place_keys() -> dict[str, Key]:
    keys: dict[str, Key] = {}
    for place in PLACES:
        group = place.partition(".")[0]
        if group in GROUPS:
            words = f"the cast of {', '.join(GROUPS[group])}"
            keys.setdefault(f"recipe.{group}", Key(words, "", "CAST"))
        keys[f"recipe.{place}"] = Key("the cast of this place", "", "CAST")
    keys["recipe.offload"] = Key("of master, grad, m, v: those in the host's memory (none)", "", "PLACE,...")
    keys["recipe.keep"] = Key("layers in compute instead of the recipe's own (none)", "", "NAME,...")
    words = "of matmuls and of all that is not narrow"
    keys["recipe.compute"] = Key(words, "", "|".join(COMPUTE))
    return keys


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None or value == {} else str(value)


def _takes(kind: Any) -> str:
    """The form of a value of this type on the command line."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return "|".join(_takes(part) for part in inside if part is not NoneType)
    if origin is Annotated:
        return _takes(inside[0])
    if origin is Literal:
        return "|".join(inside)
    if origin is tuple:
        return _list_of([_takes(part) for part in inside if part is not Ellipsis], Ellipsis in inside)
    if isinstance(kind, type) and issubclass(kind, bool):
        return "true|false"
    return {int: "N", float: "X", str: "TEXT"}.get(kind, "JSON")


def _list_of(parts: Iterable[str], is_open: bool) -> str:
    return ",".join([*parts, *(["..."] if is_open else [])])
