"""Maps our tensor names to other programs' names, and holds an external model in our names.

    ours                      GPT-2 (`transformer.h.I.`)      Llama, Mixtral, Qwen2, Qwen3 (`model.layers.I.`)
    embedding                 transformer.wte                 model.embed_tokens
    position_embedding        transformer.wpe                 -
    blocks.I.attention_norm   ln_1                            input_layernorm
    blocks.I.qkv              attn.c_attn (transposed)        self_attn.q_proj, k_proj, v_proj
    blocks.I.q_norm, k_norm   -                               self_attn.q_norm, k_norm (Qwen3)
    blocks.I.attention_out    attn.c_proj (transposed)        self_attn.o_proj
    blocks.I.mlp_norm         ln_2                            post_attention_layernorm
    blocks.I.gate_up          -                               mlp.gate_proj, up_proj
    blocks.I.up               mlp.c_fc (transposed)           -
    blocks.I.down             mlp.c_proj (transposed)         mlp.down_proj
    blocks.I.experts.router   -                               block_sparse_moe.gate, Qwen3: mlp.gate
    .experts.J.gate_up        -                               .experts.J.w1, w3; Qwen3: gate_proj, up_proj
    .experts.J.down           -                               .experts.J.w2; Qwen3: down_proj
    norm                      transformer.ln_f                model.norm
    head                      lm_head                         lm_head            (not stored where tied)

(Source: `modeling_gpt2.py`, `modeling_llama.py`, `modeling_qwen2.py`, `modeling_qwen3.py` of transformers;
for experts the folders of the hub, with one tensor for each, which transformers 5 stacks as it reads them.)
GPT-2's linear layers are `Conv1D`s there, with weights of shape (in, out). q, k and v are rows of our qkv, in
this order, and gate and up are rows of our gate_up. Both sides store the two halves of a rotated head in the
same order.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from narrowgauge.data import Tokenizer
from narrowgauge.errors import UserError
from narrowgauge.models import ModelConfig, Transformer


@dataclass(frozen=True, slots=True)
class NamePair:
    """One of our tensors and the external tensors that make it up."""

    ours: str
    theirs: tuple[str, ...]
    rows: tuple[int, ...] = ()  # of our tensor in each external one; () if there is only one
    transposed: bool = False  # whether external tensors are stored as (in, out)

    def split(self, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The external tensors, by name, as views of our tensor."""
        parts = tensor.split(self.rows) if self.rows else (tensor,)
        for name, part in zip(self.theirs, parts, strict=True):
            yield name, part.T if self.transposed else part

    def join(self, read: Callable[[str], torch.Tensor], origin: Path) -> torch.Tensor:
        """Our tensor, from the external ones that `read` returns by name; a `UserError` if they misfit."""
        parts = [read(name) for name in self.theirs]
        shapes = [tuple(part.shape) for part in parts]
        if self.rows and shapes != [(rows, *shapes[-1][1:]) for rows in self.rows]:
            raise UserError(
                f"{origin}: {', '.join(self.theirs)} have the shapes {shapes}, but its configuration "
                f"requires {', '.join(map(str, self.rows))} rows of one length; give weights and "
                "configuration of one model"
            )
        parts = [part.T if self.transposed else part for part in parts]
        return torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()


@dataclass(frozen=True)
class ExternalModel:
    """A model of another program in our names."""

    format: str  # "hf", "llmc" or "gguf"
    config: ModelConfig
    tensors: Mapping[str, torch.Tensor]  # float32; a tied head is listed under both names
    tokenizer: Path | None = None  # the tokenizer.json that came with it
    precisions: frozenset[str] = frozenset()  # in which the tensors were stored
    special_tokens: Mapping[str, Any] = field(default_factory=dict)  # `huggingface.special_tokens_of`
    made_tokenizer: Tokenizer | None = None  # from the model's own file, if that holds one

    @property
    def precision(self) -> str:
        """The formats in which the tensors were stored, such as "bf16", or "bf16 and fp32"."""
        return " and ".join(sorted(self.precisions))


def external_model(
    format: str,
    config: ModelConfig,
    tensors: dict[str, torch.Tensor],
    origin: Path,
    tokenizer: Path | None = None,
    precisions: Iterable[str] = (),
) -> ExternalModel:
    """The record of a model; a `UserError` names the first tensor whose shape contradicts `config`."""
    if config.tied_head:
        tensors["head.weight"] = tensors["embedding.weight"]
    shapes = parameter_shapes(config)
    assert tensors.keys() == shapes.keys()
    for name, shape in shapes.items():
        if tensors[name].shape != shape:
            raise UserError(
                f"{origin}: {name} has shape {tuple(tensors[name].shape)}, but its configuration requires "
                f"{tuple(shape)}; give weights and configuration of one model"
            )
    return ExternalModel(format, config, tensors, tokenizer, frozenset(precisions))


def require_layers(config: ModelConfig, tensors: int, origin: Path) -> None:
    """Refuse a configuration with more layers than tensors, before memory is allocated for each."""
    if config.layers > tensors:
        raise UserError(
            f"{origin}: its configuration has {config.layers} layers, and there are {tensors} tensors; "
            "give weights and configuration of one model"
        )


def parameter_shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """The shape of each of our tensors; a tied head is listed under both names."""
    with torch.device("meta"):
        model = Transformer(config)
    return {name: p.shape for name, p in model.named_parameters(remove_duplicate=False)}


def name_map(config: ModelConfig) -> list[NamePair]:
    """Every stored tensor of a model, with Hugging Face's names for its family."""
    names = (_gpt2 if config.positions == "learned" else _llama)(config)
    pairs = []
    for ours in parameter_shapes(config):
        if ours == "head.weight" and config.tied_head:
            continue
        module, parameter = ours.rsplit(".", 1)
        modules, rows, transposed = names[module]
        theirs = tuple(f"{name}.{parameter}" for name in modules)
        pairs.append(NamePair(ours, theirs, rows, transposed and parameter == "weight"))
    return pairs


_Names = dict[str, tuple[Sequence[str], tuple[int, ...], bool]]


def _gpt2(config: ModelConfig) -> _Names:
    names: _Names = {
        "embedding": (["transformer.wte"], (), False),
        "position_embedding": (["transformer.wpe"], (), False),
        "norm": (["transformer.ln_f"], (), False),
        "head": (["lm_head"], (), False),
    }
    for i in range(config.layers):
        layer = f"transformer.h.{i}."
        names |= {
            f"blocks.{i}.attention_norm": ([layer + "ln_1"], (), False),
            f"blocks.{i}.qkv": ([layer + "attn.c_attn"], (), True),
            f"blocks.{i}.attention_out": ([layer + "attn.c_proj"], (), True),
            f"blocks.{i}.mlp_norm": ([layer + "ln_2"], (), False),
            f"blocks.{i}.up": ([layer + "mlp.c_fc"], (), True),
            f"blocks.{i}.down": ([layer + "mlp.c_proj"], (), True),
        }
    return names


def _llama(config: ModelConfig) -> _Names:
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    names: _Names = {
        "embedding": (["model.embed_tokens"], (), False),
        "norm": (["model.norm"], (), False),
        "head": (["lm_head"], (), False),
    }
    for i in range(config.layers):
        layer = f"model.layers.{i}."
        qkv = [f"{layer}self_attn.{x}_proj" for x in "qkv"]
        for norm in ("q_norm", "k_norm") if config.qk_norm else ():
            names[f"blocks.{i}.{norm}"] = ([f"{layer}self_attn.{norm}"], (), False)
        names |= {
            f"blocks.{i}.attention_norm": ([layer + "input_layernorm"], (), False),
            f"blocks.{i}.qkv": (qkv, (q, kv, kv), False),
            f"blocks.{i}.attention_out": ([layer + "self_attn.o_proj"], (), False),
            f"blocks.{i}.mlp_norm": ([layer + "post_attention_layernorm"], (), False),
        }
        names |= _mlps(config, f"blocks.{i}.", layer)
    return names


def _mlps(config: ModelConfig, ours: str, layer: str) -> _Names:
    """The MLP of a block, or its router and experts."""
    gate, up, down = f"{layer}mlp.gate_proj", f"{layer}mlp.up_proj", f"{layer}mlp.down_proj"
    if not config.experts:
        return _mlp(ours, gate, up, down, config.ffn_dim)
    moe = f"{layer}mlp." if config.qk_norm else f"{layer}block_sparse_moe."
    parts = ("gate_proj", "up_proj", "down_proj") if config.qk_norm else ("w1", "w3", "w2")
    names: _Names = {f"{ours}experts.router": ([f"{moe}gate"], (), False)}
    for j in range(config.experts):
        gate, up, down = (f"{moe}experts.{j}.{part}" for part in parts)
        names |= _mlp(f"{ours}experts.{j}.", gate, up, down, config.ffn_dim)
    return names


def _mlp(ours: str, gate: str, up: str, down: str, ffn: int) -> _Names:
    return {f"{ours}gate_up": ([gate, up], (ffn, ffn), False), f"{ours}down": ([down], (), False)}
