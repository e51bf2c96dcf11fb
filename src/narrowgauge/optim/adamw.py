"""AdamW (Loshchilov & Hutter, arXiv 1711.05101) on state in any numbers.

The update is a pure function in float32, torch's own; only its edges are narrow:

    read       weight (or its master), gradient, m, v    exactly, as float32
    update     m, v, weight
    write      each in the cast of its place, rounded once, in memory allocated once

Which numbers a tensor's state has depends on the tensor: moments are narrow for matrices of 4096 elements or
more (smaller ones cost nothing, and rounding hurts them most), weights and gradients where `nn.convert` made
them so. Random bits of stochastic rounding are a function of (seed, step, tensor, element).
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim.adamw import adamw

from narrowgauge.errors import UserError
from narrowgauge.formats import Stream, stream
from narrowgauge.quantization import AtRest, Cast, make_cast
from narrowgauge.recipes import Recipe
from narrowgauge.recipes import recipe as recipe_named

SMALLEST_NARROW = 4096  # elements of a matrix whose moments may be narrow
FP32 = make_cast("fp32")
_FIRST_STREAM = 2**34  # above the tensor ids of layers (nn.places)


class AdamW(torch.optim.Optimizer):
    """AdamW whose moments, masters and gradients are kept as a recipe says."""

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        recipe: str | Recipe = "fp32",
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        seed: int = 0,
    ) -> None:
        """Make the state, zeros.

        Args:
            params: tensors or groups of them, as any optimizer of torch takes; those of a model that
                `nn.convert` put under the same recipe bring their masters and gradients with them.
            recipe: names the casts of `m` and `v`.
            seed: of stochastic rounding.
        """
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.recipe = recipe_named(recipe) if isinstance(recipe, str) else recipe
        self.seed = seed
        for p in self._parameters():
            is_large = p.ndim >= 2 and p.numel() >= SMALLEST_NARROW
            casts = self.recipe.state if is_large else {"m": FP32, "v": FP32}
            self.state[p] = {
                "step": torch.zeros((), device=p.device),
                "m": AtRest(p.shape, _cast(casts, "m"), p.device),
                "v": AtRest(p.shape, _cast(casts, "v"), p.device),
            }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None
        number = 0
        for group in self.param_groups:
            plain: list[torch.Tensor] = []
            for p in group["params"]:
                if _is_plain(p, self.state[p]):
                    plain += [p] if p.grad is not None else []
                else:
                    self._update_narrow(p, group, _FIRST_STREAM + 4 * number)
                number += 1
            states = [self.state[p] for p in plain]
            m, v = ([s[place].read() for s in states] for place in ("m", "v"))
            _update(
                plain,
                [g for p in plain if (g := p.grad) is not None],
                m,
                v,
                [s["step"] for s in states],
                group,
            )

    def _update_narrow(self, p: torch.Tensor, group: dict[str, Any], first_stream: int) -> None:
        """Update a parameter of which anything is not fp32."""
        g = gradient(p)
        if g is None:
            return
        s, master, at_rest = self.state[p], _part(p, "master"), _part(p, "at_rest")
        source = master or at_rest
        w, m, v = p.float() if source is None else source.read(), s["m"].read(), s["v"].read()
        w, g = w.contiguous(), g.contiguous()  # torch's fused update ignores strides
        _update([w], [g], [m], [v], [s["step"]], group)
        streams = [self._stream(first_stream + i, s["step"], p.device) for i in range(4)]
        for at, (to, x) in enumerate(((s["m"], m), (s["v"], v), (master, w), (at_rest, w))):
            if to is not None:
                to.write(x, streams[at] if to.cast.rounding == "stochastic" else None)
        if at_rest is None and w is not p:
            p.copy_(w)

    def _stream(self, tensor: int, step: torch.Tensor, device: torch.device) -> Stream:
        return stream(self.seed, int(step), tensor, device)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, narrow ones included."""
        super().zero_grad(set_to_none)
        for p in self._parameters():
            if (narrow := _part(p, "gradient")) is not None:
                narrow.is_empty = True

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients, narrow ones too, to a global 2-norm of at most `max_norm`; returns the norm.

        The norms of the tensors are put together in float64, so that their order does not matter.
        """
        every = (gradient(p) for p in self._parameters())
        norms = [torch.linalg.vector_norm(g).double() for g in every if g is not None]
        if not norms:
            return torch.zeros(())
        total = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms])).float()
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for p in self._parameters():
            if (narrow := _part(p, "gradient")) is not None:
                narrow.scale_by(factor.to(p.device))
            elif p.grad is not None:
                p.grad.mul_(factor.to(p.device))
        return total

    def tensors(self, names: Mapping[torch.Tensor, str]) -> dict[str, torch.Tensor]:
        """The state as `{"PARAMETER.m.values": tensor, ...}`: the optimizer's own tensors."""
        return {
            f"{names[p]}.{key}": tensor
            for p in self._parameters()
            for key, tensor in self._tensors_of(p).items()
        }

    def restore(self, names: Mapping[torch.Tensor, str], saved: Mapping[str, torch.Tensor]) -> None:
        """Copy saved state back, bit for bit.

        Raises:
            UserError: it is the state of another model or of another recipe; the first difference is named.
        """
        own = self.tensors(names)
        if unknown := sorted(saved.keys() - own.keys()) or sorted(own.keys() - saved.keys()):
            whose = "the checkpoint" if unknown[0] in saved else "this optimizer"
            raise UserError(
                f"the checkpoint's optimizer is another's: only {whose} has {unknown[0]!r}; "
                "use the run's own configuration"
            )
        for key, tensor in saved.items():
            if tensor.dtype != own[key].dtype or tensor.shape != own[key].shape:
                found, wanted = (f"{t.dtype} {tuple(t.shape)}" for t in (tensor, own[key]))
                raise UserError(
                    f"the checkpoint's optimizer state {key!r} is {found}, and this recipe keeps it as "
                    f"{wanted}; use the run's own configuration"
                )
        for key, tensor in saved.items():
            own[key].copy_(tensor)

    def state_dict(self) -> dict[str, Any]:
        """The state by parameter number, and the groups: tensors and numbers only."""
        state = {i: self._tensors_of(p) for i, p in enumerate(self._parameters())}
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a `state_dict` back, every tensor in its own dtype (torch's method would cast them)."""
        names = {p: str(i) for i, p in enumerate(self._parameters())}
        saved = {f"{i}.{k}": t for i, of_one in state_dict["state"].items() for k, t in of_one.items()}
        self.restore(names, saved)
        for group, of_one in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(of_one)

    def _parameters(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _tensors_of(self, p: torch.Tensor) -> dict[str, torch.Tensor]:
        s = self.state[p]
        moments = {f"{place}.{k}": t for place in ("m", "v") for k, t in s[place].tensors.items()}
        return {"step": s["step"]} | moments


def gradient(p: torch.Tensor) -> torch.Tensor | None:
    """A parameter's gradient as float32, wherever it is kept; None if there is none."""
    narrow = _part(p, "gradient")
    if narrow is not None:
        return None if narrow.is_empty else narrow.read()
    return None if p.grad is None else p.grad.float()


def _part(p: torch.Tensor, name: str) -> Any:
    """What `nn.weights` hung on a parameter."""
    return getattr(p, name, None)


def _cast(casts: Mapping[str, Cast | None], place: str) -> Cast:
    cast = casts[place]
    assert cast is not None
    return cast


def _is_plain(p: torch.Tensor, state: Mapping[str, Any]) -> bool:
    """Whether all of a parameter is fp32, so that it can be updated where it lies."""
    narrow = any(_part(p, name) is not None for name in ("at_rest", "gradient"))
    return p.dtype == torch.float32 and not narrow and state["m"].cast == state["v"].cast == FP32


def _update(
    w: list[torch.Tensor],
    g: list[torch.Tensor],
    m: list[torch.Tensor],
    v: list[torch.Tensor],
    steps: list[torch.Tensor],
    group: Mapping[str, Any],
) -> None:
    """Torch's AdamW on float32 tensors, in place."""
    if w:
        beta1, beta2 = group["betas"]
        options = {"lr": group["lr"], "weight_decay": group["weight_decay"], "eps": group["eps"]}
        options |= {"beta1": beta1, "beta2": beta2, "amsgrad": False, "maximize": False}
        adamw(w, g, m, v, [], steps, fused=True, **options)
