"""Converts between Hugging Face's `config.json` and our `ModelConfig`, for the families that both have.

They are GPT-2, Llama, Mixtral, Qwen2, and Qwen3 with and without experts. A Mistral without a sliding window
is read, and is a Llama from then on:

    ours                  GPT-2                Llama, Qwen2, Qwen3
    dim                   n_embd               hidden_size
    layers                n_layer              num_hidden_layers
    heads, kv_heads       n_head               num_attention_heads, num_key_value_heads
    head_dim              n_embd / n_head      head_dim
    ffn_dim               n_inner (4 n_embd)   intermediate_size
    max_sequence_length   n_positions          max_position_embeddings
    norm_eps              layer_norm_epsilon   rms_norm_eps
    rope_*                -                    rope_theta, rope_scaling (transformers 4), rope_parameters (5)
    bias                  always               attention_bias and mlp_bias (Llama)
    qkv_bias              -                    always (Qwen2)
    qk_norm               -                    always (Qwen3)
    experts               -                    num_local_experts (Mixtral), num_experts (Qwen3)
    ffn_dim, with these   -                    intermediate_size (Mixtral), moe_intermediate_size (Qwen3)
    experts_per_token     -                    num_experts_per_tok
    norm_topk_prob        -                    always (Mixtral), norm_topk_prob (Qwen3)
    tied_head             tie_word_embeddings  tie_word_embeddings

(Source: the configuration classes of Hugging Face transformers, whose defaults apply where a key is missing.)
What our model does not compute is refused, never dropped: another activation, another kind of scaled rotary
positions, a sliding window, a mixture of layers with and without experts.
"""

from collections.abc import Mapping
from typing import Any

from narrowgauge.checkpoint.interop.hf_rope import rope_from, rope_to
from narrowgauge.checkpoint.interop.hf_values import needed, require
from narrowgauge.errors import UserError, unknown
from narrowgauge.models import ModelConfig

FAMILIES = ("gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
_FLAGS = ("tied_head", "bias", "qkv_bias", "qk_norm", "norm_topk_prob")
_BOTH = {"vocab_size": "vocab_size", "initial_std": "initializer_range", "tied_head": "tie_word_embeddings"}
_GPT2 = _BOTH | {
    "dim": "n_embd",
    "layers": "n_layer",
    "heads": "n_head",
    "ffn_dim": "n_inner",
    "max_sequence_length": "n_positions",
    "norm_eps": "layer_norm_epsilon",
}
_LLAMA = _BOTH | {
    "dim": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn_dim": "intermediate_size",
    "max_sequence_length": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
}
#: Where a key is missing: positions (of Qwen's families 32768), and heads for keys (of Llama all heads).
_POSITIONS = {"llama": 2048, "mistral": 131072, "mixtral": 131072}
_KV_HEADS = {"mistral": 8, "mixtral": 8, "qwen2": 32, "qwen3": 32, "qwen3_moe": 4}
_BEYOND = 2**31
_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")


def config_from(values: Mapping[str, Any], where: str) -> ModelConfig:
    """The model configuration of a `config.json`; `where` begins each error message."""
    family = values.get("model_type")
    if family == "gpt_oss":
        raise UserError(
            f"{where}: gpt_oss has attention sinks and biases of experts, which this model does not compute; "
            "open it in transformers with quantization_config=Mxfp4Config(dequantize=True) and train it "
            "through narrowgauge.convert"
        )
    if family not in FAMILIES:
        raise UserError(f"{where}: {unknown('model_type', str(family), FAMILIES)}")
    ours = _from_gpt2(values, where) if family == "gpt2" else _from_llama(values, str(family), where)
    for key, value in ours.items():
        if isinstance(value, bool) and key not in _FLAGS:
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
    square = c.heads * c.head_dim == c.dim and c.kv_heads == c.heads
    if (c.positions, c.norm, c.mlp, c.bias, c.qkv_bias, square, c.qk_norm) == (
        *("learned", "layer", "gelu"),
        *(True, True, True, False),
    ) and not c.experts:
        return "gpt2"
    if (c.positions, c.norm, c.mlp) == ("rope", "rms", "swiglu"):
        if c.qk_norm:
            if not c.bias and not c.qkv_bias:
                return "qwen3_moe" if c.experts else "qwen3"
        elif c.experts:
            if not c.bias and not c.qkv_bias and c.norm_topk_prob:
                return "mixtral"
        elif c.bias == c.qkv_bias:
            return "llama"
        elif c.qkv_bias:
            return "qwen2"
    raise UserError(
        f"no family of Hugging Face's has positions = {c.positions}, norm = {c.norm}, mlp = {c.mlp}, "
        f"bias = {c.bias}, qkv_bias = {c.qkv_bias}, qk_norm = {c.qk_norm}, experts = {c.experts} and "
        f"{c.kv_heads} of {c.heads} heads for keys; exported are GPT-2 (learned, layer, gelu, bias, as many "
        "heads for keys) and Llama, Qwen2 or Qwen3 (rope, rms, swiglu; Qwen3 has qk_norm and no bias); with "
        "experts Qwen3 and Mixtral (no qk_norm, no bias, norm_topk_prob)"
    )


def to_config(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` of a configuration, without its tokens and dtype."""
    family = family_of(config)
    keys, more = (_GPT2, _to_gpt2(config)) if family == "gpt2" else (_LLAMA, _to_llama(config, family))
    values = {theirs: getattr(config, ours) for ours, theirs in keys.items()}
    if not config.initial_std:  # a program uses its default for weights that it adds, such as another head
        del values["initializer_range"]
    return {"architectures": [ARCHITECTURES[family]], "model_type": family, **values, **more}


def _read(values: Mapping[str, Any], keys: Mapping[str, str], where: str, **defaults: Any) -> dict[str, Any]:
    """The values of our keys; one without a default must be there."""
    return {
        ours: values.get(theirs, defaults[ours]) if ours in defaults else needed(values, theirs, where)
        for ours, theirs in keys.items()
    }


def _from_gpt2(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    require(values, "activation_function", _TANH_GELU, where)
    require(values, "scale_attn_weights", (True,), where)
    require(values, "scale_attn_by_inverse_layer_idx", (False,), where)
    require(values, "add_cross_attention", (False,), where)
    ours = _read(values, _GPT2, where, ffn_dim=None, norm_eps=1e-5, initial_std=0.02, tied_head=True)
    if not isinstance(dim := ours["dim"], int):
        raise UserError(f"{where}: n_embd = {dim!r}, but it must be a whole number; fix the file")
    ours["ffn_dim"] = ours["ffn_dim"] or 4 * dim
    return ours | {"positions": "learned", "norm": "layer", "mlp": "gelu", "bias": True}


def _from_llama(values: Mapping[str, Any], family: str, where: str) -> dict[str, Any]:
    has_head_norms = family.startswith("qwen3")
    if has_head_norms:
        require(values, "attention_bias", (False,), where)
    require(values, "hidden_act", ("silu", "swish"), where)
    require(values, "use_sliding_window", (False,), where)
    if family == "mistral":
        require({"sliding_window": 4096, **values}, "sliding_window", (None,), where)
    biased = values.get("attention_bias", False) if family == "llama" else False
    if family == "llama" and values.get("mlp_bias", False) != biased:
        raise UserError(
            f"{where}: biases in attention or MLP alone, and this model has them in both or in neither; "
            "give a model without them"
        )
    types = values.get("layer_types") or []
    if not isinstance(types, list) or any(kind != "full_attention" for kind in types):
        raise UserError(
            f"{where}: layer_types with a sliding window, or another attention than full_attention, which is "
            "not computed here; give a model without"
        )
    ours = _read(
        values,
        _LLAMA,
        where,
        kv_heads=_KV_HEADS.get(family),
        head_dim=None,
        max_sequence_length=_POSITIONS.get(family, 32768),
        norm_eps=1e-5 if family == "mixtral" else 1e-6,
        initial_std=0.02,
        tied_head=False,
    )
    ours["kv_heads"] = ours["kv_heads"] or 0
    ours["head_dim"] = ours["head_dim"] or (128 if family == "qwen3" else 0)
    return {
        **ours,
        "bias": biased,
        "qkv_bias": family == "qwen2" or None,
        "qk_norm": has_head_norms,
        **rope_from(values, where, 1_000_000.0 if family == "mixtral" else 10_000.0),
        **_experts_from(values, family, where),
    }


def _experts_from(values: Mapping[str, Any], family: str, where: str) -> dict[str, Any]:
    if family not in ("mixtral", "qwen3_moe"):
        return {}
    is_mixtral = family == "mixtral"
    if is_mixtral:
        require(values, "sliding_window", (None,), where)
    require(values, "router_jitter_noise", (0.0,), where)
    require(values, "decoder_sparse_step", (1,), where)
    require(values, "mlp_only_layers", ([], None), where)
    experts = values.get("num_local_experts", values.get("num_experts"))  # transformers 5 writes the former
    width = {} if is_mixtral else {"ffn_dim": values.get("moe_intermediate_size", 768)}
    return width | {
        "experts": experts or (8 if is_mixtral else 128),
        "experts_per_token": values.get("num_experts_per_tok", 2 if is_mixtral else 8),
        "norm_topk_prob": is_mixtral or values.get("norm_topk_prob", False),
    }


def _to_gpt2(config: ModelConfig) -> dict[str, Any]:
    return {
        "activation_function": "gelu_new",
        "attn_pdrop": config.attention_dropout,
        **dict.fromkeys(("embd_pdrop", "resid_pdrop"), config.dropout),
    }


def _to_llama(config: ModelConfig, family: str) -> dict[str, Any]:
    by_family: dict[str, dict[str, Any]] = {
        "llama": {"attention_bias": config.bias, "mlp_bias": config.bias},
        "mixtral": {"num_local_experts": config.experts},
        "qwen2": {},
        "qwen3": {"attention_bias": False},
        "qwen3_moe": {
            "attention_bias": False,
            "num_experts": config.experts,
            "moe_intermediate_size": config.ffn_dim,
            "norm_topk_prob": config.norm_topk_prob,
        },
    }
    more = by_family[family]
    if config.experts:
        more["num_experts_per_tok"] = config.experts_per_token
    dropout = {"attention_dropout": config.attention_dropout} if config.attention_dropout else {}
    return more | dropout | {"hidden_act": "silu", **rope_to(config)}
