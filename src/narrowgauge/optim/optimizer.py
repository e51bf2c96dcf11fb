"""The edges of every optimizer here: state in any numbers, whose updates are pure functions in float32.

    read       weight (or its master), gradient, moments    exactly, as float32
    update     moments, weight                              `adamw.py`, `muon.py`
    write      each in the cast of its place, rounded once, in memory allocated once

Which numbers a tensor's state has depends on the tensor: moments are narrow for matrices of 4096 elements or
more (smaller ones cost nothing, and rounding hurts them most), weights and gradients where `nn.convert` made
them so. Random bits of stochastic rounding are a function of (seed, step, tensor, element).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from narrowgauge.errors import UserError
from narrowgauge.formats import random_stream, stream_key
from narrowgauge.optim.parameter import gradient, has_gradient, hung, local, part_of
from narrowgauge.optim.state_writer import Narrow, Write, batches, is_random, write_all
from narrowgauge.quantization import QuantizedState, TensorShard, make_cast
from narrowgauge.recipes import Recipe
from narrowgauge.recipes import recipe as recipe_named

SMALLEST_NARROW = 4096  # elements of a matrix whose moments may be narrow
FP32 = make_cast("fp32")
_FIRST_STREAM = 2**34  # above the tensor ids of layers (nn.places)
_WRITTEN = ("m", "v", "master", "at_rest")  # each with a stream of its own

Tensors = list[torch.Tensor]
Parts = list[TensorShard | None]
# update(weights, gradients, {moment: tensors}, steps, options, parts), all float32, in place
Update = Callable[[Tensors, Tensors, Mapping[str, Tensors], Tensors, Mapping[str, Any], Parts], None]
# at_rest(parameter, its state, options, number of the step, key words of a place's random bits): updates all
# that hangs on the parameter where it lies, if it can; whether it did
KeyOf = Callable[[str], tuple[int, int]]
FusedUpdate = Callable[[torch.Tensor, Mapping[str, Any], Mapping[str, Any], int, KeyOf], bool]


@dataclass(frozen=True)
class Algorithm:
    """How weights move: the moments it keeps, its update, and the same of state at rest, if there is one."""

    moments: tuple[str, ...]
    update: Update
    at_rest: FusedUpdate | None = None


@dataclass(frozen=True)
class ModelGroup:
    """The processes that hold a model together: all of them, and how many there are for each parameter."""

    group: dist.ProcessGroup
    for_each: int


class Optimizer(torch.optim.Optimizer):
    """Moves parameters by the algorithm of their group, with state as a recipe says.

    Of a parameter that several processes hold together each moves its own part, which hangs on it (`part`,
    and `number`, its place among all parameters, and `stages`, how many of a pipeline have it); `model_group`
    says who they are.
    """

    model_group: ModelGroup | None = None
    algorithms: ClassVar[Mapping[str, Algorithm]]

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        recipe: str | Recipe,
        defaults: dict[str, Any],
        seed: int,
    ) -> None:
        """Make the state, zeros.

        Args:
            params: tensors or groups of them, as any optimizer of torch takes; those of a model that
                `nn.convert` put under the same recipe bring their masters and gradients with them.
            recipe: names the casts of the moments, and what of the state lies on the host.
            defaults: of the groups' options; "algorithm" among them.
            seed: of stochastic rounding.
        """
        super().__init__(params, defaults)
        self.recipe = recipe_named(recipe) if isinstance(recipe, str) else recipe
        self.seed = seed
        for group in self.param_groups:
            for p in group["params"]:
                part = part_of(p)
                size = p.numel() if part is None else part.shape.numel()
                is_large = p.ndim >= 2 and size >= SMALLEST_NARROW
                self.state[p] = {"step": torch.zeros((), device=p.device)}
                for place in self.algorithms[group["algorithm"]].moments:
                    cast = (self.recipe.state[place] if is_large else None) or FP32
                    on_host = is_large and place in self.recipe.offload
                    self.state[p][place] = QuantizedState(local(p).shape, cast, p.device, on_host, part)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None
        narrow: list[Narrow] = []
        number = 0
        for group in self.param_groups:
            plain: Tensors = []
            for p in group["params"]:
                if self._is_plain(p):
                    plain += [p] if p.grad is not None else []
                elif has_gradient(p):
                    own = getattr(p, "number", number)
                    narrow.append((p, group, _FIRST_STREAM + len(_WRITTEN) * own))
                number += 1
            self._update_plain(plain, group)
        number_of = self._step_numbers([p for p, *_ in narrow])
        for these, following in pairwise([*batches(narrow), []]):
            for p, *_ in following:
                self._fetch(p)
            write_all([write for one in these for write in self._update_narrow(*one, number_of[one[0]])])

    def _step_numbers(self, parameters: Tensors) -> dict[torch.Tensor, int]:
        """The step that each parameter is about to take: a device is waited for once, not for each."""
        taken = [self.state[p]["step"] for p in parameters]
        if not taken or taken[0].is_meta:
            return dict.fromkeys(parameters, 0)
        counts = torch.stack([step.to(taken[0].device) for step in taken]).tolist()
        return {p: int(count) + 1 for p, count in zip(parameters, counts, strict=True)}

    def _update_plain(self, plain: Tensors, group: Mapping[str, Any]) -> None:
        """Update parameters of which everything is fp32, where they lie."""
        if not plain:
            return
        states = [self.state[p] for p in plain]
        algorithm = self.algorithms[group["algorithm"]]
        moments = {place: [s[place].read() for s in states] for place in algorithm.moments}
        gradients = [local(g) for p in plain if (g := p.grad) is not None]
        parts = [part_of(p) for p in plain]
        algorithm.update(
            [local(p) for p in plain], gradients, moments, [s["step"] for s in states], group, parts
        )

    def _update_narrow(
        self, p: torch.Tensor, group: Mapping[str, Any], first_stream: int, number: int
    ) -> Iterator[Write]:
        """Update a parameter of which anything is not fp32, or not here; what remains to be written."""
        s, master, at_rest = self.state[p], hung(p, "master"), hung(p, "at_rest")
        algorithm = self.algorithms[group["algorithm"]]

        def key_of(place: str) -> tuple[int, int]:
            return stream_key(self.seed, number, first_stream + _WRITTEN.index(place))

        if algorithm.at_rest is not None and algorithm.at_rest(p, s, group, number, key_of):
            return
        g = gradient(p)
        assert g is not None
        source = master or at_rest
        here = local(p)
        w = here.float() if source is None else source.read()
        moments = {place: s[place].read() for place in algorithm.moments}
        w, g = w.contiguous(), g.contiguous()  # torch's fused update ignores strides
        algorithm.update([w], [g], {k: [m] for k, m in moments.items()}, [s["step"]], group, [part_of(p)])
        written = {place: (s[place], x) for place, x in moments.items()}
        for place, (to, x) in {**written, "master": (master, w), "at_rest": (at_rest, w)}.items():
            if to is not None:
                tensor = first_stream + _WRITTEN.index(place)
                yield to, x, random_stream(self.seed, number, tensor, p.device) if is_random(to) else None
        if at_rest is None and w is not here:
            here.copy_(w)

    def _is_plain(self, p: torch.Tensor) -> bool:
        """Whether all of a parameter is fp32 and here, so that it can be updated where it lies."""
        narrow = any(hung(p, name) is not None for name in ("at_rest", "gradient"))
        is_here = all(m.cast == FP32 and not m.on_host for m in self.moments(p).values())
        return p.dtype == torch.float32 and not narrow and is_here

    def _fetch(self, p: torch.Tensor) -> None:
        """Begin to bring a parameter's state from the host, while another is updated."""
        parts = [hung(p, name) for name in ("master", "at_rest", "gradient")]
        for state in (*self.state[p].values(), *parts):
            if isinstance(state, QuantizedState):
                state.fetch()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, narrow ones included."""
        super().zero_grad(set_to_none)
        for p in self.parameters():
            if (narrow := hung(p, "gradient")) is not None:
                narrow.is_empty = True

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients, narrow ones too, to a global norm of at most `max_norm`; returns the norm.

        Squares are summed in float64, so that neither the order of tensors nor their division over processes
        matters.
        """
        every = ((p, gradient(p)) for p in self.parameters())
        wide = torch.float64
        norms = {p: torch.linalg.vector_norm(g, norm_type, dtype=wide) for p, g in every if g is not None}
        if not norms and self.model_group is None:
            return torch.zeros(())
        total = self._norm_of_all(norms, norm_type).float()
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for p in self.parameters():
            if (narrow := hung(p, "gradient")) is not None:
                narrow.scale_by(factor.to(p.device))
            elif p.grad is not None:
                local(p.grad).mul_(factor.to(p.device))
        return total

    def _norm_of_all(self, norms: Mapping[torch.Tensor, torch.Tensor], norm_type: float) -> torch.Tensor:
        """The norm of all gradients from those of the tensors that are here, float64."""
        device = next(iter(norms), torch.zeros(())).device
        if self.model_group is None:
            return torch.linalg.vector_norm(torch.stack([n.to(device) for n in norms.values()]), norm_type)
        assert norm_type != torch.inf, "a sum over processes"
        total = torch.zeros((), dtype=torch.float64, device=device)
        for p, norm in norms.items():
            part = part_of(p)
            holders = self.model_group.for_each * getattr(p, "stages", 1)
            copies = holders // (1 if part is None else part.shard_count)
            total += norm.to(device) ** norm_type / copies
        dist.all_reduce(total, group=self.model_group.group)
        return total ** (1 / norm_type)

    def tensors(self, names: Mapping[torch.Tensor, str]) -> dict[str, torch.Tensor]:
        """The state as `{"PARAMETER.m.values": tensor, ...}`: the optimizer's own tensors."""
        if torch.cuda.is_available():  # what is on its way to the host has to be there
            torch.cuda.synchronize()
        return {
            f"{names[p]}.{key}": tensor
            for p in self.parameters()
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
                "use the run's own configuration, or `narrowgauge convert` to go on under another recipe"
            )
        for key, tensor in saved.items():
            if tensor.dtype != own[key].dtype or tensor.shape != own[key].shape:
                found, wanted = (f"{t.dtype} {tuple(t.shape)}" for t in (tensor, own[key]))
                raise UserError(
                    f"the checkpoint's optimizer state {key!r} is {found}, and this recipe keeps it as "
                    f"{wanted}; use the run's own recipe, or `narrowgauge convert` to go on under another"
                )
        for key, tensor in saved.items():
            own[key].copy_(tensor)

    def state_dict(self) -> dict[str, Any]:
        """The state by parameter number, and the groups: tensors and numbers only."""
        state = {i: self._tensors_of(p) for i, p in enumerate(self.parameters())}
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a `state_dict` back, every tensor in its own dtype (torch's method would cast them)."""
        names = {p: str(i) for i, p in enumerate(self.parameters())}
        saved = {f"{i}.{k}": t for i, of_one in state_dict["state"].items() for k, t in of_one.items()}
        self.restore(names, saved)
        for group, of_one in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(of_one)

    def parameters(self) -> Tensors:
        """All of them, in the order of the groups."""
        return [p for group in self.param_groups for p in group["params"]]

    def moments(self, p: torch.Tensor) -> dict[str, QuantizedState]:
        """A parameter's moments at rest, by place."""
        return {place: s for place, s in self.state[p].items() if isinstance(s, QuantizedState)}

    def _tensors_of(self, p: torch.Tensor) -> dict[str, torch.Tensor]:
        moments = {f"{place}.{k}": t for place, m in self.moments(p).items() for k, t in m.tensors.items()}
        return {"step": self.state[p]["step"]} | moments
