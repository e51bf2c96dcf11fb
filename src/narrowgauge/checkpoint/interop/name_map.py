"""Our tensors under other programs' names: which of theirs make up one of ours.

    ours                      GPT-2 (`transformer.h.I.`)      Llama, Qwen2 (`model.layers.I.`)
    embedding                 transformer.wte                 model.embed_tokens
    position_embedding        transformer.wpe                 -
    blocks.I.attention_norm   ln_1                            input_layernorm
    blocks.I.qkv              attn.c_attn (transposed)        self_attn.q_proj, k_proj, v_proj
    blocks.I.attention_out    attn.c_proj (transposed)        self_attn.o_proj
    blocks.I.mlp_norm         ln_2                            post_attention_layernorm
    blocks.I.gate_up          -                               mlp.gate_proj, up_proj
    blocks.I.up               mlp.c_fc (transposed)           -
    blocks.I.down             mlp.c_proj (transposed)         mlp.down_proj
    norm                      transformer.ln_f                model.norm
    head                      lm_head                         lm_head            (not stored where tied)

(Source: `modeling_gpt2.py`, `modeling_llama.py`, `modeling_qwen2.py` of Hugging Face transformers.)
GPT-2's linear layers are `Conv1D`s there, whose weight is (in, out). q, k and v are rows of ours, in
this order, and so are gate and up; the order of the two halves of a rotated head is the same on both
sides.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from narrowgauge.errors import UserError
from narrowgauge.models import ModelConfig, Transformer


@dataclass(frozen=True, slots=True)
class NamePair:
    """One of our tensors, and the tensors it is elsewhere, which hold `rows` of it each."""

    ours: str
    theirs: tuple[str, ...]
    rows: tuple[int, ...] = ()
    transposed: bool = False

    def split(self, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Ours as theirs: views, no copies."""
        parts = tensor.split(self.rows) if self.rows else (tensor,)
        for name, part in zip(self.theirs, parts, strict=True):
            yield name, part.T if self.transposed else part

    def join(self, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Theirs as ours."""
        parts = [read(name) for name in self.theirs]
        parts = [part.T if self.transposed else part for part in parts]
        return torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()


def name_map(config: ModelConfig) -> list[NamePair]:
    """Every tensor of a model, in Hugging Face's names for its family."""
    names = (_gpt2 if config.positions == "learned" else _llama)(config)
    stored = [name for name in external_shapes(config) if name != "head.weight" or not config.tied_head]
    counterparts = []
    for ours in stored:
        module, kind = ours.rsplit(".", 1)
        theirs, rows, transposed = names[module]
        places = tuple(f"{name}.{kind}" for name in theirs)
        counterparts.append(NamePair(ours, places, rows, transposed and kind == "weight"))
    return counterparts


def external_shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """The shape of each of our tensors; a tied head is there under both names."""
    with torch.device("meta"):
        model = Transformer(config)
    return {name: p.shape for name, p in model.named_parameters(remove_duplicate=False)}


def check_shapes(config: ModelConfig, tensors: Mapping[str, torch.Tensor], origin: str) -> None:
    """Refuse tensors that are not those of the configuration, naming the first."""
    for name, shape in external_shapes(config).items():
        if name in tensors and tensors[name].shape != shape:
            raise UserError(
                f"{origin}: {name} has the shape {tuple(tensors[name].shape)}, and its configuration makes "
                f"it {tuple(shape)}; give weights and configuration of one model"
            )


_Names = dict[str, tuple[Sequence[str], tuple[int, ...], bool]]


def _gpt2(config: ModelConfig) -> _Names:
    names: _Names = {
        "embedding": (["transformer.wte"], (), False),
        "position_embedding": (["transformer.wpe"], (), False),
        "norm": (["transformer.ln_f"], (), False),
        "head": (["lm_head"], (), False),
    }
    for i in range(config.layers):
        here = f"transformer.h.{i}."
        names |= {
            f"blocks.{i}.attention_norm": ([here + "ln_1"], (), False),
            f"blocks.{i}.qkv": ([here + "attn.c_attn"], (), True),
            f"blocks.{i}.attention_out": ([here + "attn.c_proj"], (), True),
            f"blocks.{i}.mlp_norm": ([here + "ln_2"], (), False),
            f"blocks.{i}.up": ([here + "mlp.c_fc"], (), True),
            f"blocks.{i}.down": ([here + "mlp.c_proj"], (), True),
        }
    return names


def _llama(config: ModelConfig) -> _Names:
    q, kv, ffn = config.heads * config.head_dim, config.kv_heads * config.head_dim, config.ffn_dim
    names: _Names = {
        "embedding": (["model.embed_tokens"], (), False),
        "norm": (["model.norm"], (), False),
        "head": (["lm_head"], (), False),
    }
    for i in range(config.layers):
        here = f"model.layers.{i}."
        qkv = [f"{here}self_attn.{x}_proj" for x in "qkv"]
        gate_up = [f"{here}mlp.{x}_proj" for x in ("gate", "up")]
        names |= {
            f"blocks.{i}.attention_norm": ([here + "input_layernorm"], (), False),
            f"blocks.{i}.qkv": (qkv, (q, kv, kv), False),
            f"blocks.{i}.attention_out": ([here + "self_attn.o_proj"], (), False),
            f"blocks.{i}.mlp_norm": ([here + "post_attention_layernorm"], (), False),
            f"blocks.{i}.gate_up": (gate_up, (ffn, ffn), False),
            f"blocks.{i}.down": ([here + "mlp.down_proj"], (), False),
        }
    return names
