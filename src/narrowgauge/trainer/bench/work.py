"""The minimum work of a step, from shapes: GEMMs, attention, and bytes that must move.

    GEMMs        2 M N K operations each: forward, input gradient, weight gradient; forward again if a
                 block is recomputed; each in the format that the hardware multiplies
    attention    forward and backward of every layer, as one kernel each
    casts        each operand is written once in the format of its GEMM, unless it has that format already; an
                 operand shared by two places is made once. The kernel that computes an activation or a
                 gradient can write the operand as well, so only a weight is read, once for all its operands
    norms ...    the rest, fused as far as possible: a norm with the preceding sum, an activation, rotary
                 positions; the embedding
    loss         logits read forward, read and written backward
    optimizer    gradients read for their norm and for the update, all state read and written

`bench` divides it by the ceilings that `ceilings` measures: the floor of a step on this machine, for any
program. It cannot be derived from the count of a step (`simulate.count`), which describes a GPU and this
program's kernels: a floor also applies to a CPU, whose passes in C are not torch operations, and to fusions
that this program lacks. A test asserts that no count is below it.

Legend: M tokens, N outputs, K inputs, D dim, F ffn_dim, V vocabulary, H head_dim.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from narrowgauge.nn import DTYPES, Linear
from narrowgauge.quantization import Cast, kept_count
from narrowgauge.quantization import cast as named_cast
from narrowgauge.trainer.simulate import estimate_memory
from narrowgauge.trainer.training import Config
from narrowgauge.trainer.training.step.build_model import build_model

#: The kind of a native GEMM, by the format of its scales; all others are fp8.
_NARROW = {"e8m0": "mxfp8", "e4m3": "fp4"}


@dataclass(frozen=True, order=True)
class Gemm:
    """A matmul (m, k) @ (k, n); `kind` is its format: fp32, bf16, fp16 or a native low-precision one.

    Low-precision kinds are fp8, mxfp8 (scales of 32 in E8M0) and fp4 (scales of 16 in E4M3).
    """

    m: int
    n: int
    k: int
    kind: str

    @property
    def flops(self) -> int:
        """Operations: a multiplication and an addition count as two."""
        return 2 * self.m * self.n * self.k


@dataclass(frozen=True)
class Attention:
    """The shape of causal attention, and its format `kind`."""

    batch: int
    heads: int
    kv_heads: int
    tokens: int
    head_dim: int
    kind: str


@dataclass
class Work:
    """The work of one optimizer step of one process."""

    attention: Attention
    attention_forward: int = 0  # count of layers' passes
    attention_backward: int = 0
    gemms: Counter[Gemm] = field(default_factory=Counter)  # times
    moved: Counter[str] = field(default_factory=Counter)  # bytes by class

    @property
    def flops(self) -> int:
        """FLOPs of all GEMMs."""
        return sum(gemm.flops * times for gemm, times in self.gemms.items())


def work_of(config: Config, native: bool) -> Work:
    """The work of a configuration's step; `native` if the hardware multiplies its low-precision formats."""
    model, recipe, t = config.spec.model, config.spec.recipe, config.training
    B, T = t.micro_batch_size, config.data.sequence_length
    work = Work(Attention(B, model.heads, model.kv_heads, T, model.head_dim, recipe.compute))
    times, M = t.batch_size // B, B * T  # micro-batches in a step, tokens in each
    every, selective = config.spec.recompute, config.spec.selective
    recomputed = -(-model.layers // every) if every else 0  # blocks
    share = recomputed / model.layers
    work.attention_forward = times * (model.layers + (0 if selective else recomputed))
    work.attention_backward = times * model.layers
    for name, layer in build_model(config.spec, torch.device("meta")).named_modules():
        if isinstance(layer, torch.nn.Linear):
            passes = times * (1 + share * _is_recomputed(name, selective)), times
            is_of_expert = ".experts." in name and not name.endswith(".router")
            tokens = -(-M * model.experts_per_token // model.experts) if is_of_expert else M  # equal shares
            _add_layer(work, layer, tokens, passes, recipe.compute, native)
    D, V = model.dim, model.vocab_size
    ffn_dim = model.ffn_dim * (model.experts_per_token if model.experts else 1)
    F = (2 if model.mlp == "swiglu" else 1) * ffn_dim
    heads = (model.heads + model.kv_heads) * model.head_dim if model.positions == "rope" else 0
    # A norm forward: the sum (read 4 + 2, write 4) and its output (2); backward reads and writes as much and
    # its input again. An activation forward reads F and writes ffn_dim; backward reads both and writes F.
    forward = 2 * 12 * D + 2 * (F + ffn_dim) + 4 * heads
    backward = 2 * 16 * D + 2 * (2 * F + ffn_dim) + 4 * heads
    if model.experts:  # a token is copied to its experts, and their results are added: 2 bytes per value
        copies = 4 * 2 * D * model.experts_per_token
        forward, backward = forward + copies, backward + copies
    again = 12 * D + 2 * (F + ffn_dim) if selective else forward
    block = forward + again * share + backward
    work.moved["norms and the rest"] = int(times * (M * (model.layers * block + 8 * D) + 4 * V * D))
    work.moved["loss"] = times * 3 * M * V * DTYPES[recipe.compute].itemsize
    memory = estimate_memory(config).device
    state = sum(memory[name] for name in ("weights", "master", "m", "v"))
    work.moved["optimizer"] = 2 * state + 2 * memory["gradients"]
    return work


def _is_recomputed(layer: str, selective: bool) -> bool:
    """Whether the GEMMs of a linear layer run again in a recomputed block, which ends at its last input."""
    kept = ("down", "qkv", "attention_out") if selective else ("down",)
    return layer.startswith("blocks.") and layer.split(".", 2)[2] not in kept


def _add_layer(
    work: Work, layer: torch.nn.Linear, tokens: int, passes: tuple[float, int], compute: str, native: bool
) -> None:
    """Add the GEMMs of a linear layer, for its passes forward and backward, and their casts."""
    M, N, K = tokens, layer.out_features, layer.in_features
    forward, backward = passes
    casts = layer.spec.casts if isinstance(layer, Linear) else {}
    width = DTYPES[compute].itemsize
    made: set[tuple[str, Cast]] = set()
    for gemm, tensors, (m, n, k), times in (
        ("fprop", ("x", "w"), (M, N, K), forward),
        ("dgrad", ("dy", "w"), (M, K, N), backward),
        ("wgrad", ("dy", "x"), (N, K, M), backward),
    ):
        operands = [(tensor, casts[f"{gemm}.{tensor}"]) for tensor in tensors if casts]
        kind = _kind([cast for _, cast in operands], compute, native)
        work.gemms[Gemm(m, n, k, kind)] += round(times)
        if gemm == "wgrad" and casts and casts["wgrad.dy"].keep_cast:
            columns = kept_count(casts["wgrad.x"].keep_channels, K)
            work.gemms[Gemm(N, columns, M, kind)] += backward
        for (tensor, cast), elements in zip(operands, (m * k, n * k), strict=False):
            source = "fp32" if tensor == "w" else compute
            if (cast.ignores_axis and (tensor, cast) in made) or cast.name == source:
                continue
            if tensor == "w" and "w" not in dict(made):
                work.moved["casts"] += backward * elements * 4
            made.add((tensor, cast))
            for part, share in _parts(cast):
                bits = part.element.bits if native and part.is_scaled else 8 * width
                work.moved["casts"] += int(int(share * times * elements) * bits / 8)
    if not casts and compute != "fp32":
        work.moved["casts"] += backward * N * K * (4 + width)


def _kind(pair: Sequence[Cast], compute: str, native: bool) -> str:
    """The format in which the GEMM of two operands is computed."""
    if native and any(cast.is_scaled for cast in pair):
        return _NARROW.get(pair[0].scale, "fp8")
    return "fp32" if any(cast.has_wide_operand for cast in pair) else compute


def _parts(cast: Cast) -> list[tuple[Cast, float]]:
    """(cast, share of the elements) for the parts of an operand; `keep_cast` alone is a second operand."""
    if not cast.keep_cast:
        return [(cast, 1.0)]
    kept = named_cast(cast.keep_cast)
    return [(cast.of_the_rest, 1 - cast.keep_channels), (kept, cast.keep_channels or 1.0)]
