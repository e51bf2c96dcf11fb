"""Maps our tensor names to other programs' names, and holds an external model in our names.

GPT-2's linear layers are `Conv1D`s there, with weights of shape (in, out). q, k and v are rows of our qkv, in
this order, and gate and up are rows of our gate_up. Both sides store the two halves of a rotated head in the
same order.

(Source: `modeling_gpt2.py`, `modeling_llama.py`, `modeling_qwen2.py`, `modeling_qwen3.py` of transformers;
for experts the folders of the hub, with one tensor for each, which transformers 5 stacks as it reads them.)
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.models import ModelConfig, Transformer

#: Their names of our modules: layer I, expert J; several are rows of ours, in this order.
GPT2 = {
    "embedding": "transformer.wte",
    "position_embedding": "transformer.wpe",
    "blocks.I.attention_norm": "transformer.h.I.ln_1",
    "blocks.I.qkv": "transformer.h.I.attn.c_attn",
    "blocks.I.attention_out": "transformer.h.I.attn.c_proj",
    "blocks.I.mlp_norm": "transformer.h.I.ln_2",
    "blocks.I.up": "transformer.h.I.mlp.c_fc",
    "blocks.I.down": "transformer.h.I.mlp.c_proj",
    "norm": "transformer.ln_f",
    "head": "lm_head",
}
CONV1D = ("qkv", "attention_out", "up", "down")
_L = "model.layers.I"
LLAMA = {
    "embedding": "model.embed_tokens",
    "blocks.I.attention_norm": f"{_L}.input_layernorm",
    "blocks.I.qkv": f"{_L}.self_attn.q_proj {_L}.self_attn.k_proj {_L}.self_attn.v_proj",
    "blocks.I.q_norm": f"{_L}.self_attn.q_norm",  # Qwen3
    "blocks.I.k_norm": f"{_L}.self_attn.k_norm",
    "blocks.I.attention_out": f"{_L}.self_attn.o_proj",
    "blocks.I.mlp_norm": f"{_L}.post_attention_layernorm",
    "blocks.I.gate_up": f"{_L}.mlp.gate_proj {_L}.mlp.up_proj",
    "blocks.I.down": f"{_L}.mlp.down_proj",
    "norm": "model.norm",
    "head": "lm_head",  # not stored where tied
}
_E, _M = f"{_L}.mlp.experts.J", f"{_L}.block_sparse_moe.experts.J"
QWEN3_EXPERTS = {
    "blocks.I.experts.router": f"{_L}.mlp.gate",
    "blocks.I.experts.J.gate_up": f"{_E}.gate_proj {_E}.up_proj",
    "blocks.I.experts.J.down": f"{_E}.down_proj",
}
MIXTRAL_EXPERTS = {
    "blocks.I.experts.router": f"{_L}.block_sparse_moe.gate",
    "blocks.I.experts.J.gate_up": f"{_M}.w1 {_M}.w3",
    "blocks.I.experts.J.down": f"{_M}.w2",
}


@dataclass(frozen=True, slots=True)
class NamePair:
    """One of our tensors and the external tensors that make it up."""

    ours: str
    theirs: tuple[str, ...]
    rows: tuple[int, ...] = ()  # of our tensor in each external one; () if there is only one
    transposed: bool = False  # whether external tensors are stored as (in, out)

    def ranges(self, length: int) -> Iterator[tuple[str, slice]]:
        """The external tensors, by name, and which of the `length` rows of ours each holds."""
        ends = list(accumulate(self.rows or (length,)))
        yield from zip(self.theirs, map(slice, [0, *ends], ends), strict=True)

    def split(self, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The external tensors, by name, as views of our tensor."""
        for name, rows in self.ranges(len(tensor)):
            yield name, tensor[rows].T if self.transposed else tensor[rows]

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
    """A model of another program in our names.

    Raises:
        UserError: the shape of a tensor contradicts the configuration.
    """

    origin: Path
    format: str  # "hf", "llmc" or "gguf"
    config: ModelConfig
    tensors: dict[str, torch.Tensor]  # float32; a tied head is listed under both names
    precisions: Collection[str]  # the formats in which the tensors were stored, such as "bf16"
    tokenizer: Path | None  # the tokenizer.json beside it, or of the one in its file
    special_tokens: Mapping[str, Any]  # `huggingface.special_tokens_of`

    def __post_init__(self) -> None:
        if self.config.tied_head:
            self.tensors["head.weight"] = self.tensors["embedding.weight"]
        shapes = parameter_shapes(self.config)
        assert self.tensors.keys() == shapes.keys()
        for name, shape in shapes.items():
            if (found := self.tensors[name].shape) != shape:
                raise UserError(
                    f"{self.origin}: {name} has shape {tuple(found)}, but its configuration requires "
                    f"{tuple(shape)}; give weights and configuration of one model"
                )


def require_layers(config: ModelConfig, tensors: int, origin: Path) -> None:
    """Refuse a configuration with more layers than tensors, before memory is allocated for each."""
    if config.layers > tensors:
        raise UserError(
            f"{origin}: its configuration has {config.layers} layers, and there are {tensors} tensors; "
            "give weights and configuration of one model"
        )


def require_tensors(
    found: Collection[str], pairs: Iterable[NamePair], optional: set[str], origin: Path
) -> None:
    """Refuse names of tensors that are not those of a model: one is missing, or has no place in it."""
    needed = {name for pair in pairs for name in pair.theirs}
    if missing := sorted(needed - {*found}):
        raise UserError(
            f"{origin} has no tensor {missing[0]!r}, which its configuration asks for; fetch it again"
        )
    if extra := sorted({*found} - needed - optional):
        raise UserError(
            f"{origin} has a tensor {extra[0]!r}, for which its configuration has no place; give a plain "
            "language model"
        )


def parameter_shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """The shape of each of our tensors; a tied head is listed under both names."""
    with torch.device("meta"):
        model = Transformer(config)
    return {name: p.shape for name, p in model.named_parameters(remove_duplicate=False)}


def name_map(config: ModelConfig) -> list[NamePair]:
    """Every stored tensor of a model, with Hugging Face's names for its family."""
    is_gpt2 = config.positions == "learned"
    q, kv, ffn = config.heads * config.head_dim, config.kv_heads * config.head_dim, config.ffn_dim
    names = GPT2 if is_gpt2 else LLAMA | (QWEN3_EXPERTS if config.qk_norm else MIXTRAL_EXPERTS)
    rows = {} if is_gpt2 else {"qkv": (q, kv, kv), "gate_up": (ffn, ffn)}
    pairs = []
    for ours in parameter_shapes(config):
        if ours == "head.weight" and config.tied_head:
            continue
        module, parameter = ours.rsplit(".", 1)
        layer, expert = [*re.findall(r"\d+", module), "", ""][:2]
        general = module.replace(f"blocks.{layer}.", "blocks.I.").replace(f"experts.{expert}.", "experts.J.")
        theirs = names[general].replace("I", layer).replace("J", expert).split()
        last = module.rpartition(".")[2]
        transposed = is_gpt2 and parameter == "weight" and last in CONV1D
        pairs.append(
            NamePair(ours, tuple(f"{name}.{parameter}" for name in theirs), rows.get(last, ()), transposed)
        )
    return pairs
