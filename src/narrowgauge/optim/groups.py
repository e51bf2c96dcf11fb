"""Groups of parameters: their weight decay, learning rate and algorithm."""

import math
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from narrowgauge.quantization import state_of
from narrowgauge.system.errors import UserError, checked, require, unknown

OPTIONS = ("weight_decay", "lr_factor")
# What an option of a group must be below; none is negative.
_BELOW = dict.fromkeys(("lr", "lr_factor", "weight_decay", "eps"), math.inf) | {"momentum": 1.0, "betas": 1.0}
_UNSERVED = ("amsgrad", "maximize")  # options of torch's AdamW that change the update
# Each row of these weights belongs to one token or position.
_WIDE = ("embedding", "position_embedding", "head", "lm_head", "wte", "wpe", "embed_tokens")


@checked
def parameter_groups(
    model: torch.nn.Module,
    weight_decay: float,
    patterns: Mapping[str, Mapping[str, float]] | None = None,
    muon: bool = False,
) -> list[dict[str, Any]]:
    """The trainable parameters of a model, grouped by weight decay, lr factor and algorithm.

    Args:
        model: The model; patterns are compared with the names of its parameters.
        weight_decay: The weight decay of matrices; vectors (norms, biases) do not decay.
        patterns: Options by pattern, `{"embedding.*": {"weight_decay": 0.0, "lr_factor": 0.5}}`; the last
            matching one wins.
        muon: Whether Muon updates the matrices other than embeddings and head.

    Returns:
        Groups for an optimizer of this package; groups of matrices come first.

    Raises:
        UserError: A pattern matches no parameter, or an option does not exist.
    """
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    patterns = patterns or {}
    for pattern, options in patterns.items():
        require(f"patterns[{pattern!r}]", options, Mapping)
        for key in options:
            if key not in OPTIONS:
                raise unknown("option of optimizer.groups", key, OPTIONS)
        if not any(fnmatchcase(name, str(pattern)) for name, _ in named):
            raise UserError(f"optimizer.groups: {pattern!r} matches no parameter; write one such as '*.bias'")
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, p in sorted(named, key=lambda item: item[1].ndim < 2):
        options = {"weight_decay": weight_decay if p.ndim >= 2 else 0.0, "lr_factor": 1.0}
        for pattern, changes in patterns.items():
            options |= changes if fnmatchcase(name, pattern) else {}
        is_hidden = p.ndim == 2 and not any(word in _WIDE for word in name.split("."))
        algorithm = "muon" if muon and is_hidden else "adamw"
        group_key = (*options.values(), algorithm)
        groups.setdefault(group_key, {"params": [], **options, "algorithm": algorithm})["params"].append(p)
    return list(groups.values())


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group: `lr` times the group's factor."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_factor", 1.0)


def members_of(group: Mapping[str, Any]) -> list[Any]:
    """The members of a group: parameters, or (name, parameter) as torch allows."""
    params = group.get("params")
    return list(params) if isinstance(params, Iterable) and not torch.is_tensor(params) else [params]


def tensor_of(member: torch.Tensor | tuple[str, torch.Tensor]) -> torch.Tensor:
    """The parameter of a member; nothing else is one."""
    p = member[1] if isinstance(member, tuple) else member
    require("a parameter", p, torch.Tensor)
    return p


def shares_memory(x: torch.Tensor) -> bool:
    """Whether elements of a tensor share memory, as those of an expanded one do."""
    return any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True))


def _why_not(p: torch.Tensor) -> str:
    """Why a parameter has no state here; empty if it has."""
    if p.is_nested or p.layout != torch.strided:
        return "is nested" if p.is_nested else "is sparse"
    if shares_memory(p):
        return "shares memory among its elements (expand)"
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    return "" if p.dtype in dtypes or state_of(p).weight else f"is {str(p.dtype).removeprefix('torch.')}"


def require_served(group: Mapping[str, Any], members: Iterable[Any]) -> None:
    """Refuse options that no optimizer here supports or that are out of range, and unsupported parameters."""
    for p in map(tensor_of, members):
        if why := _why_not(p):
            raise UserError(
                f"a parameter of shape {'?' if p.is_nested else tuple(p.shape)} {why}, and narrowgauge's "
                "optimizers update dense float32, bfloat16 and float16: use torch.optim.AdamW for it"
            )
    for option, end in _BELOW.items():
        count, what = (2, "two numbers") if option == "betas" else (1, "a number")
        given = group.get(option, (0.0,) * count)
        numbers = given if isinstance(given, Sequence) else (given,)
        if len(numbers) != count or not all(hasattr(n, "__float__") and 0 <= float(n) < end for n in numbers):
            raise UserError(f"{option} = {given!r}: it must be {what} from 0 and below {end:g}")
    for option in _UNSERVED:
        if group.get(option):
            raise UserError(
                f"a parameter group has {option} = {group[option]!r}, which narrowgauge's optimizers do not "
                "support: remove it, or use torch.optim.AdamW with a recipe whose weights are fp32"
            )
