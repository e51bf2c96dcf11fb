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

from dataclasses import dataclass
from typing import Annotated, Literal, get_args, get_type_hints

from narrowgauge.system.errors import UserError, unknown

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

    dim: Annotated[int, "width of the residual stream"]
    layers: Annotated[int, "number of blocks"]
    heads: Annotated[int, "query heads"]
    kv_heads: Annotated[int, "key and value heads, each shared by heads / kv_heads query heads; 0: heads"] = 0
    head_dim: Annotated[int, "width of one head; 0: dim / heads"] = 0
    ffn_dim: Annotated[int, "width inside the MLP, or inside each expert"]
    vocab_size: Annotated[int, "rows of the embedding and of the output head"]
    max_sequence_length: Annotated[int, "the longest sequence, in tokens, that the model takes"]
    positions: Annotated[Positions, "as in GPT-2, or as in Llama"] = "rope"
    rope_theta: Annotated[float, "base of the rotary frequencies"] = 10_000.0
    rope_factor: Annotated[float, "Llama 3.1 scaling: slow frequencies are stretched so far; 1: off"] = 1.0
    rope_low_freq_factor: Annotated[float, "fewer turns in the original context: stretched fully"] = 1.0
    rope_high_freq_factor: Annotated[float, "more turns: left alone; in between: interpolated"] = 4.0
    rope_original_positions: Annotated[int, "the context that the frequencies were first trained on"] = 8192
    norm: Annotated[NormKind, "LayerNorm or RMSNorm"] = "rms"
    norm_eps: Annotated[float, "added to the variance"] = 1e-5
    mlp: Annotated[MlpKind, "as in GPT-2, or as in Llama"] = "swiglu"
    bias: Annotated[bool, "of the linear layers and of LayerNorm"] = False
    qkv_bias: Annotated[bool | None, "of the query, key and value projection; else as bias"] = None
    qk_norm: Annotated[bool, "RMSNorm over each head of queries and keys, as in Qwen3 (False)"] = False
    experts: Annotated[int, "MLPs of a block, a few of which a token passes through; 0: one for all"] = 0
    experts_per_token: Annotated[int, "experts that a token passes through"] = 2
    norm_topk_prob: Annotated[bool, "whether the weights of a token's experts sum to one"] = True
    tied_head: Annotated[bool, "whether the output head shares the embedding's weight"] = False
    dropout: Annotated[float, "in training, of embedding, attention and MLP: share of elements (0.0)"] = 0.0
    attention_dropout: Annotated[float, "in training, of attention's probabilities (0.0)"] = 0.0
    initial_std: Annotated[float, "of weights before training; 0: one for each role of a weight"] = 0.0

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
            divisors = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            raise UserError(
                f"model.heads = {self.heads} must be a multiple of model.kv_heads = {self.kv_heads}, as each "
                "key-value head serves equally many query heads; use kv_heads = "
                f"{min(divisors, key=lambda n: abs(n - self.kv_heads))}"
            )

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
_COUNTS = tuple(name for name, kind in get_type_hints(ModelConfig).items() if kind is int)
_CHOICES = {"positions": get_args(Positions), "norm": get_args(NormKind), "mlp": get_args(MlpKind)}


def _require_count(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"model.{name} = {value!r} must be a whole number of at least {least}")
