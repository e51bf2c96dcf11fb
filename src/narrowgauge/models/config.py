"""A model as one frozen record: its dimensions, and the choices that distinguish GPT-2 from Llama.

    choice        GPT-2                  Llama 3
    positions     "learned"              "rope"
    norm          "layer"                "rms"
    mlp           "gelu" (tanh form)     "swiglu"
    bias          True                   False
    tied_head     True                   True up to 3B, False above
    kv_heads      = heads                < heads (grouped-query attention)

Any mixture is allowed: Qwen2, for example, is Llama with `qkv_bias=True`, Qwen3 is Llama with `qk_norm=True`,
and Mixtral is Llama with `experts=8`. The record is validated once, on construction, so no other file has to
check whether the dimensions fit together.
"""

from dataclasses import dataclass, fields
from typing import Literal, get_args

from narrowgauge.errors import UserError, unknown

Positions = Literal["learned", "rope"]
NormKind = Literal["layer", "rms"]
MlpKind = Literal["gelu", "swiglu"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The dimensions and choices of one decoder-only transformer.

    `kv_heads`, `head_dim` and `qkv_bias` may be left out; they are then derived (`heads`, `dim // heads`,
    `bias`) and read back as the derived value. To vary a named model use `model_config(name, dim=...)`, which
    derives them again; `dataclasses.replace` would keep the old ones.

    Raises:
        UserError: A value breaks a rule.
    """

    dim: int  #: width of the residual stream
    layers: int  #: number of blocks
    heads: int  #: query heads
    kv_heads: int = 0  #: key and value heads, each shared by heads / kv_heads query heads; 0 = heads
    head_dim: int = 0  #: width of one head; 0 = dim // heads
    ffn_dim: int  #: width inside the MLP, or inside each expert
    vocab_size: int  #: rows of the embedding and of the output head
    max_sequence_length: int  #: the longest supported sequence, in tokens
    positions: Positions = "rope"
    rope_theta: float = 10_000.0  #: base of the rotary frequencies
    rope_factor: float = 1.0  #: Llama 3.1 scaling: how far the slow frequencies are stretched; 1 = off
    rope_low_freq_factor: float = 1.0  #: fewer turns than this in the original context: stretched fully
    rope_high_freq_factor: float = 4.0  #: more turns than this: left alone; in between: interpolated
    rope_original_positions: int = 8192  #: the context the frequencies were first trained on
    norm: NormKind = "rms"
    norm_eps: float = 1e-5
    mlp: MlpKind = "swiglu"
    bias: bool = False  #: biases in the linear layers (never in the head) and in LayerNorm
    qkv_bias: bool | None = None  #: bias of the query, key and value projection; None = as `bias`
    qk_norm: bool = False  #: RMSNorm over each head of queries and keys, before rotary positions (Qwen3)
    experts: int = 0  #: MLPs per block, of which each token passes through a few; 0 = one MLP for all
    experts_per_token: int = 2  #: experts that a token passes through
    norm_topk_prob: bool = True  #: the weights of a token's experts sum to one
    tied_head: bool = False  #: the output head shares the embedding's weight
    dropout: float = 0.0  #: in training: of the embedding, and of what attention and MLP add to the stream
    attention_dropout: float = 0.0  #: in training: of the probabilities of attention, without a fused kernel
    initial_std: float = 0.0  #: of weights before training; 0 = one per role (`initial_weights.py`)

    def __post_init__(self) -> None:
        for name in _COUNTS:
            _require_count(name, getattr(self, name), least=0 if name in _MAY_BE_0 else 1)
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise unknown(f"model.{name}", str(getattr(self, name)), choices)
        self._derive()
        self._require_heads_fit()
        self._require_rope_fits()
        if 0 < self.experts < self.experts_per_token:
            raise UserError(
                f"model.experts_per_token = {self.experts_per_token} must be at most model.experts = "
                f"{self.experts}; lower it"
            )
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(
                    f"model.{name} = {getattr(self, name)} must be at least 0 and below 1; GPT-3 used 0.1"
                )
        if not self.norm_eps > 0:
            raise UserError(f"model.norm_eps = {self.norm_eps} must be positive; 1e-5 is usual")
        if not self.initial_std >= 0:
            raise UserError(
                f"model.initial_std = {self.initial_std} must be at least 0; GPT-2 and Llama have 0.02, and "
                "0 gives each weight the one of its role"
            )

    def _derive(self) -> None:
        """Fill in what was left out, so that readers never have to."""
        if self.head_dim == 0 and self.dim % self.heads:
            raise UserError(
                f"model.dim = {self.dim} must be a multiple of model.heads = {self.heads}; "
                f"change one of them, or give model.head_dim"
            )
        object.__setattr__(self, "head_dim", self.head_dim or self.dim // self.heads)
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "qkv_bias", self.bias if self.qkv_bias is None else self.qkv_bias)

    def _require_heads_fit(self) -> None:
        if self.heads % self.kv_heads:
            raise UserError(
                f"model.heads = {self.heads} must be a multiple of model.kv_heads = {self.kv_heads}, as each "
                f"key-value head serves equally many query heads; use kv_heads = {self._nearest_kv_heads()}"
            )

    def _nearest_kv_heads(self) -> int:
        divisors = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
        return min(divisors, key=lambda n: abs(n - self.kv_heads))

    def _require_rope_fits(self) -> None:
        if self.positions != "rope":
            return
        if self.head_dim % 2:
            raise UserError(
                f"model.head_dim = {self.head_dim} must be even, as rotary positions turn pairs of numbers; "
                f"use an even head_dim or model.positions = learned"
            )
        if not self.rope_theta > 1:
            raise UserError(f"model.rope_theta = {self.rope_theta} must be above 1; 10000 is usual")
        if not self.rope_factor >= 1:
            raise UserError(
                f"model.rope_factor = {self.rope_factor} must be at least 1; 1 turns the scaling off"
            )
        if not 0 < self.rope_low_freq_factor < self.rope_high_freq_factor:
            raise UserError(
                f"model.rope_low_freq_factor = {self.rope_low_freq_factor} must be positive and below "
                f"model.rope_high_freq_factor = {self.rope_high_freq_factor}; Llama 3 uses 1 and 4"
            )


_MAY_BE_0 = ("kv_heads", "head_dim", "experts")
_COUNTS = tuple(f.name for f in fields(ModelConfig) if f.type is int)
_CHOICES = {"positions": get_args(Positions), "norm": get_args(NormKind), "mlp": get_args(MlpKind)}


def _require_count(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"model.{name} = {value!r} must be a whole number of at least {least}")
