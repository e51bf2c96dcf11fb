"""Converts between Hugging Face's `config.json` and our `ModelConfig`, for the families that both have.

They are the records of `FAMILIES`: GPT-2, Llama, Mixtral, Qwen2, and Qwen3 with and without experts. A
Mistral without a sliding window is read, and is a Llama from then on. Rotary positions are plain, or scaled
as in Llama 3.1: `rope_theta` and `rope_scaling` (transformers 4), or `rope_parameters` (5).

(Source: the configuration classes of Hugging Face transformers, whose defaults apply where a key is missing.)
What our model does not compute is refused, never dropped: another activation, another kind of scaled rotary
positions, a sliding window, a mixture of layers with and without experts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from narrowgauge.system.errors import UserError, unknown
from narrowgauge.trainer.models import ModelConfig


@dataclass(frozen=True)
class Family:
    """A family of transformers."""

    architecture: str  # its class
    keys: dict[str, str]  # their key for each of ours that varies from model to model
    assumed: dict[str, Any]  # what transformers takes for a key that is missing
    fixed: dict[str, Any]  # ours that all of its models share
    # their keys, each with the values that are computed here; the first one where it is missing
    demanded: dict[str, tuple[Any, ...]]


_BOTH = {"vocab_size": "vocab_size", "initial_std": "initializer_range", "tied_head": "tie_word_embeddings"}
_GPT2 = Family(
    "GPT2LMHeadModel",
    _BOTH
    | {"dim": "n_embd", "layers": "n_layer", "heads": "n_head", "ffn_dim": "n_inner"}
    | {"max_sequence_length": "n_positions", "norm_eps": "layer_norm_epsilon"},
    {"n_inner": None, "layer_norm_epsilon": 1e-5, "initializer_range": 0.02, "tie_word_embeddings": True},
    {
        "positions": "learned",
        "norm": "layer",
        "mlp": "gelu",
        "bias": True,
        "qkv_bias": True,
        "qk_norm": False,
    },
    {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
)
_KEYS = _BOTH | {
    "dim": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",  # null: all heads
    "head_dim": "head_dim",
    "ffn_dim": "intermediate_size",
    "max_sequence_length": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
}
_ASSUMED = {
    **{"num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6},
    **{"initializer_range": 0.02, "tie_word_embeddings": False, "rope_theta": 10_000.0},
}
_ROPE = {"positions": "rope", "norm": "rms", "mlp": "swiglu", "qk_norm": False}
_PLAIN = _ROPE | {"bias": False, "qkv_bias": False}
_EXPERTS = {"experts": "num_experts", "experts_per_token": "num_experts_per_tok"}
#: Demanded keys that are also written.
_WRITTEN = ("activation_function", "hidden_act", "attention_bias")
_NO_WINDOW: dict[str, tuple[Any, ...]] = {"sliding_window": (None,)}
_ALL_EXPERTS: dict[str, tuple[Any, ...]] = {
    "router_jitter_noise": (0.0,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], None),
}


def _like_llama(
    name: str,
    fixed: dict[str, Any],
    assumed: dict[str, Any],
    keys: dict[str, str] | None = None,
    demanded: dict[str, tuple[Any, ...]] | None = None,
) -> Family:
    """A family by what it has beside Llama's; those with norms of heads have no biases."""
    always: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu", "swish"), "use_sliding_window": (False,)}
    always |= {"attention_bias": (False,)} if fixed["qk_norm"] else {}
    own = _KEYS | (keys or {}), _ASSUMED | assumed, fixed, always | (demanded or {})
    return Family(f"{name}ForCausalLM", *own)


_MISTRAL = {"max_position_embeddings": 131072, "num_key_value_heads": 8}
_MIXTRAL = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2}
_MOE = {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": False}
FAMILIES: Mapping[str, Family] = {
    "gpt2": _GPT2,
    "llama": _like_llama(
        "Llama",
        _ROPE,
        {"max_position_embeddings": 2048, "attention_bias": False},
        {"bias": "attention_bias"},
    ),
    "mistral": _like_llama("Llama", _PLAIN, _MISTRAL | {"sliding_window": 4096}, demanded=_NO_WINDOW),
    "mixtral": _like_llama(
        "Mixtral",
        _PLAIN | {"norm_topk_prob": True},
        _MISTRAL | _MIXTRAL,
        _EXPERTS | {"experts": "num_local_experts"},
        _NO_WINDOW | _ALL_EXPERTS,
    ),
    "qwen2": _like_llama("Qwen2", _PLAIN | {"qkv_bias": True}, {"num_key_value_heads": 32}),
    "qwen3": _like_llama("Qwen3", _PLAIN | {"qk_norm": True}, {"num_key_value_heads": 32, "head_dim": 128}),
    "qwen3_moe": _like_llama(
        "Qwen3Moe",
        _PLAIN | {"qk_norm": True},
        _MOE | {"moe_intermediate_size": 768},
        _EXPERTS | {"ffn_dim": "moe_intermediate_size", "norm_topk_prob": "norm_topk_prob"},
        _ALL_EXPERTS,
    ),
}
_BEYOND = 2**31
#: Our keys for scaled positions, and theirs.
_SCALED = {
    "rope_factor": "factor",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_original_positions": "original_max_position_embeddings",
}


def config_from(values: Mapping[str, Any], where: str) -> ModelConfig:
    """The model configuration of a `config.json`; `where` begins each error message."""
    name = str(values.get("model_type"))
    if name == "gpt_oss":
        raise UserError(
            f"{where}: gpt_oss has attention sinks and biases of experts, which this model does not compute; "
            "open it in transformers with quantization_config=Mxfp4Config(dequantize=True) and train it "
            "through narrowgauge.convert"
        )
    if name not in FAMILIES:
        raise UserError(f"{where}: {unknown('model_type', name, [*FAMILIES])}")
    family = FAMILIES[name]
    said = {**family.assumed, **values}
    if "experts" in family.keys:  # transformers 5 writes the former
        experts = values.get("num_local_experts", values.get("num_experts"))
        key = family.keys["experts"]
        said[key] = experts or family.assumed[key]
    _require(said, family.demanded, where)
    ours = {key: _needed(said, theirs, where) for key, theirs in family.keys.items()} | family.fixed
    if name == "gpt2":
        if not isinstance(dim := ours["dim"], int):
            raise UserError(f"{where}: n_embd = {dim!r}, but it must be a whole number; fix the file")
        ours["ffn_dim"] = ours["ffn_dim"] or 4 * dim
    else:
        ours |= {
            "kv_heads": ours["kv_heads"] or 0,
            "head_dim": ours["head_dim"] or 0,
            **_rope_from(said, where),
        }
        _require_layers_alike(said, name, where)
    for key, value in ours.items():
        if isinstance(value, bool) and not str(ModelConfig.__annotations__[key]).count("bool"):
            raise UserError(f"{where}: {key} = {value}, but it must be a number; fix the file")
        if type(value) is int and value >= _BEYOND:
            raise UserError(f"{where}: {key} = {value} exceeds the size of any model; fix the file")
    try:
        return ModelConfig(**ours)
    except (UserError, TypeError) as error:
        raise UserError(f"{where} describes an impossible model: {error}") from None


def family_of(config: ModelConfig) -> str:
    """The family that a configuration belongs to; a `UserError` for a combination that no family has."""
    c = config
    for name, family in FAMILIES.items():
        is_square = c.heads * c.head_dim == c.dim and c.kv_heads == c.heads
        fits = is_square if name == "gpt2" else "bias" in family.fixed or c.bias == c.qkv_bias
        if fits and ("experts" in family.keys) == bool(c.experts) and {**vars(c), **family.fixed} == vars(c):
            return name
    raise UserError(
        f"no family of Hugging Face's has positions = {c.positions}, norm = {c.norm}, mlp = {c.mlp}, "
        f"bias = {c.bias}, qkv_bias = {c.qkv_bias}, qk_norm = {c.qk_norm}, experts = {c.experts} and "
        f"{c.kv_heads} of {c.heads} heads for keys; exported are GPT-2 (learned, layer, gelu, bias, as many "
        "heads for keys) and Llama, Qwen2 or Qwen3 (rope, rms, swiglu; Qwen3 has qk_norm and no bias); with "
        "experts Qwen3 and Mixtral (no qk_norm, no bias, norm_topk_prob)"
    )


def to_config(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` of a configuration, without its tokens and dtype."""
    name = family_of(config)
    family = FAMILIES[name]
    values = {theirs: getattr(config, ours) for ours, theirs in family.keys.items()}
    values |= {theirs: family.demanded[theirs][0] for theirs in _WRITTEN if theirs in family.demanded}
    if not config.initial_std:  # a program uses its default for weights that it adds, such as another head
        del values["initializer_range"]
    if name == "gpt2":
        values |= dict.fromkeys(("embd_pdrop", "resid_pdrop"), config.dropout)
        values["attn_pdrop"] = config.attention_dropout
    else:
        scaling = {theirs: getattr(config, ours) for ours, theirs in _SCALED.items()}
        is_scaled = config.rope_factor != 1  # in the form that all versions of transformers read
        values |= {"rope_theta": config.rope_theta, "intermediate_size": config.ffn_dim}
        values["rope_scaling"] = {"rope_type": "llama3", **scaling} if is_scaled else None
        values |= {"attention_dropout": config.attention_dropout} if config.attention_dropout else {}
        values |= {"mlp_bias": config.bias} if name == "llama" else {}
    return {"architectures": [family.architecture], "model_type": name, **values}


def _require_layers_alike(said: Mapping[str, Any], name: str, where: str) -> None:
    """Refuse biases in a half of a layer, and layers with another attention."""
    if name == "llama" and said.get("mlp_bias", False) != said["attention_bias"]:
        raise UserError(
            f"{where}: biases in attention or MLP alone, and this model has them in both or in neither; "
            "give a model without them"
        )
    types = said.get("layer_types") or []
    if not isinstance(types, list) or any(kind != "full_attention" for kind in types):
        raise UserError(
            f"{where}: layer_types with a sliding window, or another attention than full_attention, which is "
            "not computed here; give a model without"
        )


def _rope_from(said: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Our keys for rotary positions."""
    scaling = said.get("rope_parameters") or said.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping) or any(isinstance(v, Mapping) for v in scaling.values()):
        raise UserError(
            f"{where}: rotary positions that differ from layer to layer; give a model with one kind"
        )
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    _require({**said, **scaling}, {"partial_rotary_factor": (1.0, None)}, where)
    if kind not in ("default", "llama3"):
        raise UserError(
            f"{where}: rotary positions scaled by {kind!r}, and this model knows 'default' and 'llama3'; "
            "give a model with one of these"
        )
    found = {"rope_theta": scaling.get("rope_theta", said["rope_theta"])}
    if kind == "llama3":
        found |= {ours: _needed(scaling, theirs, where) for ours, theirs in _SCALED.items()}
    return {key: float(v) if type(v) is int and "positions" not in key else v for key, v in found.items()}


def _require(said: Mapping[str, Any], demanded: Mapping[str, tuple[Any, ...]], where: str) -> None:
    """Refuse a value that is not one of those computed here."""
    for key, allowed in demanded.items():
        if (found := said.get(key, allowed[0])) not in allowed:
            raise UserError(
                f"{where}: {key} = {found!r}, and only {allowed[0]!r} is computed here; give a model without "
                "it"
            )


def _needed(values: Mapping[str, Any], key: str, where: str) -> Any:
    """A value without a default."""
    if key not in values:
        raise UserError(f"{where} has no {key!r}, which every model of its kind has; fetch the folder again")
    return values[key]
