"""The MLP of a block, down(act(up(x))) with act = gelu, or silu(gate) * up; and a mixture of several.

In a mixture of experts each token passes through a few of the MLPs:

    p_ME = softmax(router(x_MD))                     over the experts, in fp32
    w_MA, chosen_MA = the A largest of each token    w / sum(w) if `norm_topk_prob` (Mixtral, Qwen3)
    y_MD = sum over a of  w_MA * expert[chosen_MA](x_MD)

(Mixtral, arXiv 2401.04088, section 2.1; no token is dropped, and experts have no capacity limit.) Assignments
are sorted by expert, and by token within it. So each expert sees one matrix of its tokens, and its two linear
layers are ordinary ones: any replacement of `torch.nn.Linear` applies to each expert separately, with
separate scales, blocks, random bits, histories and gauges. A token's experts are summed in the order of their
weights, in fp32, using only gathers, so that nothing depends on the order of atomic additions.

An expert without tokens computes one row of zeros and drops the result. Its gradient is then zero instead of
missing, so that all processes that share parameters have one, and no amax is affected. Without gradients it
computes nothing.

The balance of a layer is that of Switch Transformers (arXiv 2101.03961, equations 4 to 6), for A experts per
token, over the tokens of a micro-batch; the model's is the mean over layers:

    balance = E * sum over experts e of  (assignments to e / M) * mean over tokens of p_Me

It is A if all experts have equally many tokens, and larger otherwise. Hugging Face's
`load_balancing_loss_func` is the same for one layer; for several it first averages both factors over layers.

Legend: B sequences, T tokens, M = B T tokens, D dim, E experts, A experts of a token, R = M A assignments.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.kernels.activation import gelu, swiglu
from narrowgauge.system.torch_compat import is_in_backward
from narrowgauge.trainer.models.config import ModelConfig

Context = Callable[[], AbstractContextManager[None]]


def add_mlp(module: nn.Module, config: ModelConfig) -> None:
    """Add the linear layers of an MLP to a module: `gate_up` (swiglu) or `up` (gelu), and `down`."""
    D, F = config.dim, config.ffn_dim
    if config.mlp == "swiglu":
        module.gate_up = nn.Linear(D, 2 * F, bias=config.bias)
    else:
        module.up = nn.Linear(D, F, bias=config.bias)
    module.down = nn.Linear(F, D, bias=config.bias)


def mlp(layers: Any, x: Tensor, around_down: Context = nullcontext) -> Tensor:
    """[..., D] in and out, by the layers that `add_mlp` gave to a module; the last within a context."""
    hidden = gelu(layers.up(x)) if hasattr(layers, "up") else swiglu(layers.gate_up(x))
    with around_down():
        y: Tensor = layers.down(hidden)
    return y


class Expert(nn.Module):
    """One MLP among several."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        add_mlp(self, config)

    def forward(self, x_MD: Tensor) -> Tensor:
        """Map a number of tokens, [n, D] to [n, D]."""
        return mlp(self, x_MD)


def all_local(
    x_RD: Tensor, tokens_E: Tensor, sizes: Sequence[int], compute: Callable[[Sequence[Tensor]], list[Tensor]]
) -> Tensor:
    """The experts' results for assignments sorted by expert, when this process has all experts."""
    return torch.cat(compute(x_RD.split(list(sizes))))


class Experts(nn.Module):
    """The router, and the experts, which are modules named 0, 1, 2 ...

    Where experts are divided over processes, an `nn.Identity` stands for an expert of another process.

    Attributes:
        local: The indices of the experts on this process.
        exchange: Sends tokens to their experts and back, as `all_local` does on one process.
        balance: The balance of the last forward pass that recorded gradients.
        tokens_E: The tokens of each expert in such passes since it was None.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.count, self.per_token = config.experts, config.experts_per_token
        self.normalizes = config.norm_topk_prob
        self.router = nn.Linear(config.dim, config.experts, bias=False)
        for number in range(config.experts):
            self.add_module(str(number), Expert(config))
        self.local = range(config.experts)
        self.exchange: Callable[..., Tensor] = all_local
        self.balance: Tensor | None = None
        self.tokens_E: Tensor | None = None

    @property
    def is_divided(self) -> bool:
        """Whether other processes have other experts."""
        return len(self.local) < self.count

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D] in and out, in one dtype."""
        B, T, D = x_BTD.shape
        x_MD = x_BTD.flatten(0, 1)
        p_ME = self.router(x_MD).float().softmax(dim=-1)
        w_MA, chosen_MA = p_ME.topk(self.per_token, dim=-1)
        if self.normalizes:
            w_MA = w_MA / w_MA.sum(dim=-1, keepdim=True)
        order_R = chosen_MA.flatten().argsort(stable=True)
        tokens_E, sizes = self._tokens(chosen_MA)
        if torch.is_grad_enabled():
            self._observe(p_ME, tokens_E)
        # Each token is repeated before it is gathered, so that the backward pass adds nothing by atomics.
        x_RD = x_MD.repeat_interleave(self.per_token, 0)[order_R]
        y_RD = self.exchange(x_RD, tokens_E, sizes, partial(self._compute, T))
        y_MAD = y_RD[order_R.argsort()].unflatten(0, (B * T, self.per_token))
        weighted_MAD = y_MAD.float() * w_MA[..., None]
        # The sum is not a view: FSDP hangs its hooks on what a block returns.
        return weighted_MAD.view(B, T, self.per_token, D).sum(dim=2).to(x_BTD.dtype)

    def _compute(self, length: int, tokens: Sequence[Tensor]) -> list[Tensor]:
        """The results of the local experts for their tokens, from sequences of `length` tokens."""
        return [self._expert(e, x, length) for e, x in zip(self.local, tokens, strict=True)]

    def _expert(self, number: int, x: Tensor, length: int) -> Tensor:
        expert = self.get_submodule(str(number))
        for layer in expert.children():
            layer.sequence_length = length  # type: ignore[assignment]
        waits = torch.is_grad_enabled() or self.is_divided  # also for weights that other processes send
        if len(x) or not waits:
            return expert(x) if len(x) else x
        return expert(torch.cat([x, x.new_zeros(1, x.shape[1])]))[:0]

    def _tokens(self, chosen_MA: Tensor) -> tuple[Tensor, list[int]]:
        """The tokens of each expert, [E], twice; on the meta device, divided about equally."""
        if chosen_MA.is_meta:
            each, more = divmod(chosen_MA.numel(), self.count)
            return chosen_MA.new_empty(self.count), [each + (e < more) for e in range(self.count)]
        tokens_E = chosen_MA.flatten().bincount(minlength=self.count)
        return tokens_E, tokens_E.tolist()

    def _observe(self, p_ME: Tensor, tokens_E: Tensor) -> None:
        """Keep the balance and the token counts; a recomputation builds the same graph and keeps none."""
        balance = self.count * (tokens_E / len(p_ME) * p_ME.mean(dim=0)).sum()
        if not is_in_backward():
            self.balance = balance
            self.tokens_E = tokens_E if self.tokens_E is None else self.tokens_E + tokens_E


def experts_of(blocks: Iterable[nn.Module]) -> list[Experts]:
    """The mixtures of experts of some blocks."""
    found = (getattr(block, "experts", None) for block in blocks)
    return [experts for experts in found if isinstance(experts, Experts)]


def with_balance(loss: Tensor, experts: Iterable[Experts], coefficient: float) -> Tensor:
    """[4]: the objective, cross entropy, z-loss and balance term, from a loss with or without a z-loss."""
    balances = []
    for layer in experts:
        assert layer.balance is not None
        balances.append(layer.balance)
        layer.balance = None  # its graph now belongs to the loss
    term = coefficient * torch.stack(balances).mean()
    if not loss.ndim:
        loss = torch.stack([loss, loss.detach(), torch.zeros_like(loss.detach())])
    return torch.cat([loss[:1] + term, loss[1:].detach(), term.detach()[None]])
