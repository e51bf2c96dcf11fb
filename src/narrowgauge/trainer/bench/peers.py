"""Peers: the same training without narrowgauge, with torch.nn.Linear and a plain loop.

    torch fp32       eager, everything in float32
    torch bf16       eager, parameters and their state in fp32, under autocast
    ... parameters   eager, parameters and their state in bf16: the setting of most published figures
    ... compiled     the same through torch.compile
    torchao R        compiled, with linear layers in FP8 by torchao's recipe R, if torchao is installed

All use torch's attention, cross entropy and fused AdamW, and clip gradients like a run.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib.util import find_spec

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from narrowgauge.optim import parameter_groups
from narrowgauge.system.errors import UserError, unknown
from narrowgauge.trainer.data import Batch
from narrowgauge.trainer.models import Transformer, initialize
from narrowgauge.trainer.training import Config

_EAGER = ("torch fp32", "torch bf16", "torch bf16 parameters")
TORCH = _EAGER + tuple(f"{name} compiled" for name in _EAGER)
TORCHAO = ("torchao tensorwise", "torchao rowwise", "torchao rowwise_with_gw_hp")


def default_peers(device: torch.device) -> list[str]:
    """The default peers of a device; on a GPU only compiled ones."""
    if device.type != "cuda":
        return ["torch fp32", "torch bf16"]
    torchao = TORCHAO if find_spec("torchao") else ()
    return ["torch bf16 compiled", "torch bf16 parameters compiled", *torchao]


def check_peers(names: Sequence[str], device: torch.device) -> None:
    """Refuse peers that are unknown or not installed, or that need a GPU where there is none."""
    for name in names:
        if name not in TORCH + TORCHAO:
            raise unknown("peer", name, TORCH + TORCHAO)
        if name in TORCHAO and not find_spec("torchao"):
            raise UserError(f"peer {name!r} is not installed here; pip install torchao, or leave it out")
        if name in TORCHAO and device.type != "cuda":
            raise UserError(f"peer {name!r} needs a GPU that multiplies FP8; leave it out")


def peer_step(
    name: str, config: Config, device: torch.device, batches: Sequence[Batch]
) -> Callable[[], object]:
    """An optimizer step of a peer on the given micro-batches; call `check_peers` first."""
    in_bf16 = "parameters" in name
    model = Transformer(config.spec.model, torch.bfloat16 if in_bf16 else torch.float32)
    initialize(model, config.training.seed)
    model.to(device, torch.bfloat16 if in_bf16 else None)
    if name in TORCHAO:
        _to_torchao(model, name.removeprefix("torchao "))
    objective: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = _Objective(model)
    if name in TORCHAO or name.endswith("compiled"):
        objective = torch.compile(objective)
    o = config.optimizer
    groups = parameter_groups(model, o.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=o.lr, betas=o.betas, eps=o.eps, fused=True)
    narrow = not in_bf16 and (name.startswith("torchao") or "bf16" in name)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=device)
        for batch in batches:
            with torch.autocast(device.type, torch.bfloat16) if narrow else nullcontext():
                loss = objective(batch.x_BT, batch.y_BT) / len(batches)
            loss.backward()
            total += loss.detach()
        clip_grad_norm_(model.parameters(), o.clip_norm)
        optimizer.step()
        return total.item()

    return step


class _Objective(torch.nn.Module):
    """The model and its loss in one module, so that they are compiled together."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, x_BT: torch.Tensor, y_BT: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy, fp32."""
        return cross_entropy(self.model(x_BT).flatten(0, 1).float(), y_BT.flatten())


def _to_torchao(model: Transformer, recipe: str) -> None:
    """Convert the linear layers of the blocks with one of torchao's recipes."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    convert_to_float8_training(
        model, config=config, module_filter_fn=lambda module, name: name.startswith("blocks.")
    )
