"""The base optimizer: reads state in any format as float32, updates it, and writes it back.

    read       weight (or its master), gradient, moments    exactly, as float32
    update     moments, weight                              a pure function: `adamw.py`, `muon.py`
    write      each in the cast of its place, rounded once; a weight from what its master then holds

Moments are low-precision only for matrices of 4096 elements or more: smaller ones save no memory, and
rounding hurts them most. Weights and gradients are low-precision where `convert` made them so. The random
bits of stochastic rounding are a function of (seed, step, tensor, element).

A 16-bit parameter that `convert` does not change would lose every update below half of its last bit. If the
recipe rounds weights stochastically, so is this one; otherwise the optimizer keeps a float32 master
(`half_precision.py`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch

from narrowgauge.formats import random_stream, stream_key
from narrowgauge.optim.algorithm import Algorithm, Tensors, UpdateBatch
from narrowgauge.optim.feedback import fed_back, require_adamw
from narrowgauge.optim.grad_norm import ModelGroup, clip_grad_norm
from narrowgauge.optim.groups import members_of, require_dense_gradients, require_served
from narrowgauge.optim.half_precision import is_half, rounded_in_place, wide_values
from narrowgauge.optim.saved_state import SavedOptimizer
from narrowgauge.optim.state_writer import NarrowParameter, Write, batches, write_all
from narrowgauge.quantization import (
    Cast,
    QuantizedState,
    gradient_of,
    has_gradient,
    local_tensor,
    make_cast,
    shard_of,
    state_of,
)
from narrowgauge.quantization.state.parameter_state import drop_gradient, is_large
from narrowgauge.recipes import Recipe, RecipeLike
from narrowgauge.recipes import recipe as recipe_named
from narrowgauge.system.errors import UserError, require, unknown

FP32 = make_cast("fp32")
_FIRST_STREAM = 2**34  # above the tensor ids of layers (`nn.operands`)
_WRITTEN = ("m", "v", "master", "weight")  # one stream for each place


class Optimizer(SavedOptimizer):
    """Updates parameters with the algorithm of their group; state is in the formats of a recipe.

    If processes share a parameter, each updates its shard (`ParamState.shard`).

    Attributes:
        model_group: The processes that share the model; None for one process.
        algorithms: The algorithms by the name that a parameter group has under "algorithm".
    """

    model_group: ModelGroup | None = None
    algorithms: ClassVar[Mapping[str, Algorithm]]

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        recipe: RecipeLike,
        defaults: dict[str, Any],
        seed: int,
    ) -> None:
        """Allocate the state as zeros.

        Args:
            params: Tensors or groups of them, as for any torch optimizer. Parameters of a model that
                `convert` changed with the same recipe bring their masters and gradients.
            recipe: The recipe with the casts of the moments and the places that are kept in host memory.
            defaults: Default options of the groups, including "algorithm".
            seed: The seed of stochastic rounding.

        Raises:
            UserError: `recipe` is not a recipe, or has a rule about `m` or `v` of some layers.
        """
        if not isinstance(recipe, str | Path | Mapping | Recipe):  # torch's take the learning rate here
            raise UserError(
                f"recipe = {recipe!r} is not a recipe; pass the recipe after the parameters, and the "
                f"learning rate by name: {type(self).__name__}(params, recipe='msamp-o2', lr=1e-3)"
            )
        require("seed", seed, int)
        self.recipe = recipe_named(recipe)
        if any({"m", "v"} & rule.state.keys() for rule in self.recipe.rules):
            raise UserError(
                f"a rule of recipe {self.recipe.name!r} sets m or v of some layers, but an optimizer does "
                "not know the names of layers; use `narrowgauge train`, or set m and v outside rules"
            )
        self.seed = seed
        has_several = isinstance(params, Iterable) and not torch.is_tensor(params)
        groups: list[Any] = [*params] if has_several else [params]
        if not groups:
            raise UserError("no parameters: give those of a model that trains any, as model.parameters()")
        super().__init__(groups, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as for any torch optimizer; its state is zeros.

        Args:
            param_group: Tensors under "params", and options. With an `lr_factor` and no `lr`, its learning
                rate is the optimizer's times the factor.

        Raises:
            UserError: An option, or a kind of parameter, is not supported by any algorithm of this package.
        """
        members = members_of(param_group)
        require_served(self.defaults | param_group, members)
        if (name := param_group.get("algorithm", self.defaults["algorithm"])) not in [*self.algorithms]:
            raise unknown("algorithm", name, self.algorithms)
        param_group = param_group | {"params": members}
        if "lr_factor" in param_group and "lr" not in param_group:
            param_group = param_group | {"lr": self.defaults["lr"] * param_group["lr_factor"]}
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for p in group["params"]:
            shard, is_narrow = shard_of(p), is_large(p)
            require_adamw(p, group["algorithm"])
            self.state[p] = {"step": torch.zeros((), dtype=torch.float32, device=p.device)}
            for place in self.algorithms[group["algorithm"]].moments:
                cast = (self.recipe.state[place] if is_narrow else None) or FP32
                on_host = is_narrow and place in self.recipe.offload
                state = QuantizedState(local_tensor(p).shape, cast, p.device, on_host, shard)
                self.state[p][place] = state
            self._ensure_master(p)

    def _ensure_master(self, p: torch.Tensor) -> None:
        """Keep a float32 master of a 16-bit parameter that is not rounded stochastically.

        It starts as zeros, which `wide_values` reads as "other code has written the parameter".
        """
        if "master" in self.state[p] or not is_half(p) or rounded_in_place(p, self.recipe):
            return
        on_host = is_large(p) and "master" in self.recipe.offload
        self.state[p]["master"] = QuantizedState(local_tensor(p).shape, FP32, p.device, on_host, shard_of(p))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: Computes the gradients first, as for any torch optimizer; its result is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        require_dense_gradients(self.parameters())
        narrow: list[NarrowParameter] = []
        position = 0
        for group in self.param_groups:
            plain: Tensors = []
            for p in group["params"]:
                if self._is_plain(p):
                    plain += [p] if p.grad is not None else []
                elif has_gradient(p):
                    index = state_of(p).index
                    number = position if index < 0 else index
                    narrow.append((p, group, _FIRST_STREAM + len(_WRITTEN) * number))
                position += 1
            if plain:
                self._update_plain(plain, group)
        step_of = self._step_numbers([p for p, *_ in narrow])
        for batch, next_batch in pairwise([*batches(narrow), []]):
            for p, *_ in next_batch:  # copied from the host while this one is updated
                for state in (*self.moments(p).values(), *state_of(p).by_place().values()):
                    state.fetch()
            write_all(self._update_narrow(*item, step_of[item[0]]) for item in batch)
        for gradient in (state_of(p).gradient for p, *_ in narrow):
            if gradient is not None:
                gradient.waits = False
        return loss

    def _step_numbers(self, parameters: Tensors) -> dict[torch.Tensor, int]:
        """The number of the next step of each parameter; waits once for the device."""
        taken = [self.state[p]["step"] for p in parameters]
        if not taken or taken[0].is_meta:
            return dict.fromkeys(parameters, 1)
        counts = torch.stack([step.to(taken[0].device) for step in taken]).tolist()
        return {p: int(count) + 1 for p, count in zip(parameters, counts, strict=True)}

    def _update_plain(self, plain: Tensors, group: Mapping[str, Any]) -> None:
        """Update in place, all at once, the parameters whose state is fp32 on their device."""
        states = [self.state[p] for p in plain]
        algorithm = self.algorithms[group["algorithm"]]
        batch = UpdateBatch(
            w=[local_tensor(p) for p in plain],
            g=[local_tensor(g).float() for p in plain if (g := p.grad) is not None],
            moments={place: [s[place].read() for s in states] for place in algorithm.moments},
            steps=[s["step"] for s in states],
            shards=[shard_of(p) for p in plain],
        )
        algorithm.apply(batch, group)

    def _update_narrow(
        self, p: torch.Tensor, group: Mapping[str, Any], first_stream: int, number: int
    ) -> Iterator[list[Write]]:
        """Update a parameter whose state is not fp32, or on the host; yields what to write, in rounds."""
        s, kept = self.state[p], state_of(p)
        algorithm = self.algorithms[group["algorithm"]]

        def key_of(place: str) -> tuple[int, int]:
            return stream_key(self.seed, number, first_stream + _WRITTEN.index(place))

        fused = None if is_half(p) else algorithm.fused_update
        if fused is not None and fused(p, s, group, number, key_of):
            return
        self._ensure_master(p)
        g = gradient_of(p)
        assert g is not None
        weight = kept.weight or rounded_in_place(p, self.recipe)
        master, local = kept.master or s.get("master"), local_tensor(p)
        source = kept.master or weight
        w = wide_values(local, s.get("master")) if source is None else source.read()
        moments = {place: s[place].read() for place in algorithm.moments}
        batch = UpdateBatch([w], [g], {k: [m] for k, m in moments.items()}, [s["step"]], [shard_of(p)])
        algorithm.apply(batch, group)

        def write(place: str, to: QuantizedState, x: torch.Tensor) -> Write:
            tensor = first_stream + _WRITTEN.index(place)
            return to, x, random_stream(self.seed, number, tensor, p.device) if to.cast.is_random else None

        is_fed_back = weight is not None and weight.cast.feedback
        first = {place: (s[place], m) for place, m in moments.items() if place != "m" or not is_fed_back}
        first["weight" if master is None else "master"] = (master or weight, w)
        if weight is None and w is not local:
            local.copy_(w)
        yield [write(place, to, x) for place, (to, x) in first.items() if to is not None]
        if weight is not None and master is not None:
            yield [write("weight", weight, master.read())]
        if weight is not None and is_fed_back:
            error = w - weight.read()
            yield [write("m", s["m"], fed_back(moments["m"], moments["v"], error, group, number))]

    def _is_plain(self, p: torch.Tensor) -> bool:
        """Whether all state of a parameter is fp32 and on its device, so that it can be updated in place."""
        is_wide = p.dtype == torch.float32 and not state_of(p).by_place()
        return is_wide and all(m.cast == FP32 and not m.on_host for m in self.moments(p).values())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, including low-precision ones."""
        for p in self.parameters():
            if state_of(p).gradient is not None:
                drop_gradient(p)
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients, including low-precision ones, to a global norm of at most `max_norm`.

        Squares are summed in float64, so that neither the order of tensors nor the sharding matters.

        Returns:
            The norm before scaling, 0-dim float32; 0 if there are no gradients.
        """
        return clip_grad_norm(self.parameters(), max_norm, norm_type, self.model_group)

    @torch.no_grad()
    def recast(self, p: torch.Tensor, place: str, cast: Cast) -> None:
        """Store a moment in another cast from now on; its values are rounded once."""
        old: QuantizedState = self.state[p][place]
        new = old.like(cast)
        if p.device.type != "meta":
            new.write(old.read())
        self.state[p][place] = new
