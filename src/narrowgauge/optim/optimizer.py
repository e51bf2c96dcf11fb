"""The base optimizer: reads state in any format as float32, updates it, and writes it back.

    read       weight (or its master), gradient, moments    exactly, as float32
    update     moments, weight                              a pure function: `adamw.py`, `muon.py`
    write      each in the cast of its place, rounded once; a weight from what its master then holds

Moments are low-precision only for matrices of 4096 elements or more: smaller ones save no memory, and
rounding hurts them most. Weights and gradients are low-precision where `convert` made them so. The random
bits of stochastic rounding are a function of (seed, step, tensor, element).

The scale of a sharded tensor comes from its amax, and each process knows only the amax of its shard. One
tensor at a time would cost a round trip each, more than a hundred per step. So sharded parameters are updated
in batches of a few million elements: all in float32, then one all-reduce, then each is rounded. A parameter
that is not sharded is updated alone, which needs float32 memory for one only.

16-bit parameters that `convert` does not change are norms, biases and embeddings of a bf16 model. bfloat16
has 8 significant bits. An update smaller than |w| 2^-9 is less than half of the last bit of w, so rounding to
nearest returns the old w at every step: at a learning rate of 1e-5 most weights never change. The remedy
depends on the format of weights in the recipe:

    stochastic rounding to the parameter's dtype    the update survives on average, without extra memory
    any other                                       a float32 master, kept with the moments

The parameter is the master rounded to nearest. If an element differs from that, other code has written it
(`load_state_dict`, `torch.nn.init`), and its master restarts from the parameter.

State is saved and restored bit for bit, and checked against the optimizer before anything is copied. That of
`torch.optim.AdamW` is taken as well: its moments are rounded once to the recipe's casts.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import chain, pairwise, zip_longest
from pathlib import Path
from typing import Any, ClassVar

import torch

from narrowgauge.formats import RandomStream, random_stream, stream_key, torch_dtype
from narrowgauge.nn.step_state import require_same_tensors
from narrowgauge.optim.carried_state import (
    PREFIX,
    TORCHS_OPTIONS,
    CarriedState,
    as_saved,
    from_torch,
    require_same_groups,
    require_torchs_adamw,
)
from narrowgauge.optim.grad_norm import ModelGroup, clip_grad_norm
from narrowgauge.optim.groups import members_of, require_served
from narrowgauge.quantization import (
    Cast,
    QuantizedState,
    TensorShard,
    gradient_of,
    has_gradient,
    local_tensor,
    make_cast,
    shard_of,
    state_of,
)
from narrowgauge.quantization.sharding.shard import all_reduce_amaxes
from narrowgauge.quantization.state.parameter_state import drop_gradient, is_large
from narrowgauge.recipes import Recipe, RecipeLike
from narrowgauge.recipes import recipe as recipe_named
from narrowgauge.system.errors import UserError, require, unknown

FP32 = make_cast("fp32")
_FIRST_STREAM = 2**34  # above the tensor ids of layers (`nn.operands`)
_WRITTEN = ("m", "v", "master", "weight")  # one stream for each place
TENSORS_A_BATCH = 2**22  # elements of a batch

Tensors = list[torch.Tensor]
NarrowParameter = tuple[torch.Tensor, Mapping[str, Any], int]  # a parameter, its group, its first stream
Write = tuple[QuantizedState, torch.Tensor, RandomStream | None]  # destination, values, random bits


@dataclass(frozen=True)
class UpdateBatch:
    """Float32 tensors of some parameters; local shards if processes share a parameter."""

    w: Tensors  # the weights, updated in place
    g: Tensors  # their gradients
    moments: Mapping[str, Tensors]  # the moments by place ("m", "v"), updated in place
    steps: Tensors  # the steps taken by each parameter, 0-dim float32; incremented in place
    #: The position of each local tensor in the full one; None for a full tensor
    shards: list[TensorShard | None]


#: `update(batch, options)`: `options` are the parameter group's.
Update = Callable[[UpdateBatch, Mapping[str, Any]], None]
#: `key_of(place)`: the key of the random bits that round the tensor of a place.
KeyOf = Callable[[str], tuple[int, int]]
#: `fused_update(parameter, state, options, step, key_of)`: updates a parameter and its state in place,
#: without float32 copies; returns False and changes nothing if it cannot.
FusedUpdate = Callable[[torch.Tensor, Mapping[str, Any], Mapping[str, Any], int, KeyOf], bool]
#: `feedback(m, v, error, options, step)`: `m` with the rounding error of a weight that has no master.
Feedback = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Mapping[str, Any], int], torch.Tensor]


@dataclass(frozen=True)
class Algorithm:
    """The places of the moments, the update of weights, a fused update and a feedback if it has them."""

    moments: tuple[str, ...]
    update: Update
    fused_update: FusedUpdate | None = None
    feedback: Feedback | None = None

    def apply(self, batch: UpdateBatch, options: Mapping[str, Any]) -> None:
        """`update` on contiguous tensors: torch's fused kernels ignore strides, and moments have none."""
        w, g = ([x.contiguous() for x in tensors] for tensors in (batch.w, batch.g))
        self.update(replace(batch, w=w, g=g), options)
        for x, updated in zip(batch.w, w, strict=True):
            if updated is not x:
                x.copy_(updated)


class Optimizer(torch.optim.Optimizer):
    """Updates parameters with the algorithm of their group; state is in the formats of a recipe.

    If processes share a parameter, each updates its shard (`ParamState.shard`).

    Attributes:
        recipe: The recipe with the casts of the moments.
        seed: The seed of stochastic rounding.
        model: A model whose recipe's state it carries, also where it updates none of the layers' weights.
        model_group: The processes that share the model; None for one process.
        algorithms: The algorithms by the name that a parameter group has under "algorithm".
    """

    model: torch.nn.Module | None = None
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
        algorithm = self.algorithms[name]
        for p in self.param_groups[-1]["params"]:
            shard, is_narrow, weight = shard_of(p), is_large(p), state_of(p).weight
            if weight is not None and weight.cast.feedback and algorithm.feedback is None:
                raise UserError(
                    f"recipe place 'weight': feedback = {weight.cast.feedback!r}, but {name} updates this "
                    'weight, and the feedback formula is for AdamW; use optimizer.name = "adamw", or remove '
                    "the key"
                )
            self.state[p] = {"step": torch.zeros((), dtype=torch.float32, device=p.device)}
            for place in algorithm.moments:
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
        master, source = kept.master or s.get("master"), kept.master or weight
        w = wide_values(local_tensor(p), s.get("master")) if source is None else source.read()
        moments = {place: s[place].read() for place in algorithm.moments}
        batch = UpdateBatch([w], [g], {k: [m] for k, m in moments.items()}, [s["step"]], [shard_of(p)])
        algorithm.apply(batch, group)

        def write(place: str, to: QuantizedState, x: torch.Tensor) -> Write:
            tensor = first_stream + _WRITTEN.index(place)
            return to, x, random_stream(self.seed, number, tensor, p.device) if to.cast.is_random else None

        feedback = algorithm.feedback if weight is not None and weight.cast.feedback else None
        first = {place: (s[place], m) for place, m in moments.items() if place != "m" or feedback is None}
        first["weight" if master is None else "master"] = (master or weight, w)
        if weight is None and w is not local_tensor(p):
            local_tensor(p).copy_(w)
        yield [write(place, to, x) for place, (to, x) in first.items() if to is not None]
        if weight is not None and master is not None:
            yield [write("weight", weight, master.read())]
        if weight is not None and feedback is not None:
            error = w - weight.read()
            yield [write("m", s["m"], feedback(moments["m"], moments["v"], error, group, number))]

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
        require_dense_gradients(self.parameters())
        return clip_grad_norm(self.parameters(), max_norm, norm_type, self.model_group)

    @torch.no_grad()
    def recast(self, p: torch.Tensor, place: str, cast: Cast) -> None:
        """Store a moment in another cast from now on; its values are rounded once."""
        old: QuantizedState = self.state[p][place]
        new = old.like(cast)
        if p.device.type != "meta":
            new.write(old.read())
        self.state[p][place] = new

    def tensors(self, names: Mapping[torch.Tensor, str]) -> dict[str, torch.Tensor]:
        """The state as `{"NAME.m.values": tensor, ...}`, without copies; `names` names the parameters."""
        return {f"{names[p]}.{key}": t for p in self.parameters() for key, t in self._tensors_of(p).items()}

    def state_dict(self) -> dict[str, Any]:
        """`own_state_dict`, with what the recipe keeps for the model (`carried_state.py`).

        Under FSDP2, every process calls it, and gets its part.
        """
        saved = self.own_state_dict()
        for p, (key, state) in zip(self.parameters(), saved["state"].items(), strict=True):
            saved["state"][key] = {name: as_saved(t, p) for name, t in state.items()}
        saved["state"][0] |= CarriedState(self.parameters(), self.model).saved()
        return saved

    def own_state_dict(self) -> dict[str, Any]:
        """The state by position of the parameter, and the groups; only tensors and numbers."""
        positions = {p: i for i, p in enumerate(self.parameters())}
        groups = [{**g, "params": [positions[p] for p in g["params"]]} for g in self.param_groups]
        return {"state": {i: self._tensors_of(p) for p, i in positions.items()}, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a `state_dict` back without changing dtypes, as torch's method would.

        Load the model's first.

        Raises:
            UserError: It is the state of another model, recipe, algorithm, division into groups, or of other
                weights than the model has; nothing was changed.
        """
        require_same_groups(self.param_groups, state_dict["param_groups"])
        groups = state_dict["param_groups"]
        saved = [state_dict["state"].get(key, {}) for group in groups for key in group["params"]]  # or names
        states = {
            p: {name: torch.as_tensor(t, device=getattr(t, "device", "cpu")) for name, t in of.items()}
            for p, of in zip(self.parameters(), saved, strict=True)
        }
        if any("exp_avg" in state for state in states.values()) or not any(states.values()):
            require_torchs_adamw(self.param_groups, groups)
            states = {p: from_torch(state, self.moments(p)) for p, state in states.items()}
            groups = [{key: group[key] for key in TORCHS_OPTIONS if key in group} for group in groups]
        named = [(key, f"{i}.", t) for i, of in enumerate(states.values()) for key, t in of.items()]
        carried = {key: local_tensor(t) for key, _, t in named if key.startswith(PREFIX)}
        own = {i + key: local_tensor(t) for key, i, t in named if not key.startswith(PREFIX)}
        of_recipe = CarriedState(self.parameters(), self.model)
        parts = of_recipe.local_parts(carried) if carried else {}
        current = self.tensors({p: str(i) for i, p in enumerate(states)})
        require_same_tensors(current, own)
        for key, tensor in own.items():
            current[key].copy_(tensor)
        if parts:
            of_recipe.load(parts)
        for group, options in zip(self.param_groups, deepcopy(groups), strict=True):
            group.update({key: value for key, value in options.items() if key != "params"})

    def __getstate__(self) -> dict[str, Any]:
        """The state for pickling and copying: that of torch's optimizers, the recipe and the seed."""
        return super().__getstate__() | {"recipe": self.recipe, "seed": self.seed}

    def parameters(self) -> list[torch.Tensor]:
        """All parameters, in the order of the groups."""
        return [p for group in self.param_groups for p in group["params"]]

    def moments(self, p: torch.Tensor) -> dict[str, QuantizedState]:
        """A parameter's moments, by place ("m", "v")."""
        return {place: s for place, s in self.state[p].items() if isinstance(s, QuantizedState)}

    def _tensors_of(self, p: torch.Tensor) -> dict[str, torch.Tensor]:
        for m in self.moments(p).values():
            m.wait()
        moments = {f"{place}.{k}": t for place, m in self.moments(p).items() for k, t in m.tensors.items()}
        return {"step": self.state[p]["step"]} | moments


def is_half(p: torch.Tensor) -> bool:
    """Whether a parameter has 16 bits and is not stored in a cast."""
    is_short = p.dtype in (torch.bfloat16, torch.float16)
    return is_short and not state_of(p).by_place().keys() & {"weight", "master"}


def rounded_in_place(p: torch.Tensor, recipe: Recipe) -> QuantizedState | None:
    """A 16-bit parameter as state that shares its memory and rounds stochastically when written.

    None if the recipe stores weights in another format.
    """
    cast = recipe.state["weight"]
    if not is_half(p) or cast is None or recipe.state["master"] is not None:
        return None
    if cast.is_scaled or not cast.is_random or torch_dtype(cast.element) != p.dtype:
        return None
    local = local_tensor(p)
    state = QuantizedState(local.shape, cast, "meta", shard=shard_of(p))
    state.tensors, state.device = {"values": local}, local.device
    return state


def wide_values(local: torch.Tensor, master: QuantizedState | None) -> torch.Tensor:
    """The float32 values of a parameter: the master's, or the parameter's where other code has written it."""
    if master is None:
        return local.float()
    wide = master.read()
    return torch.where(wide.to(local.dtype) == local, wide, local.float())


def require_dense_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Refuse sparse and nested gradients, before anything is changed."""
    for p in parameters:
        if state_of(p).gradient is None and p.grad is not None and p.grad.layout != torch.strided:
            raise UserError(
                f"a gradient of shape {tuple(p.shape)} is sparse, and narrowgauge's optimizers take dense "
                "ones: make its layer without sparse gradients, as torch.nn.Embedding(sparse=False) is"
            )


def batches(narrow: Iterable[NarrowParameter]) -> Iterator[list[NarrowParameter]]:
    """Parameters that are updated together: each alone, unless it is sharded.

    Shards differ in size, but all processes must form the same batches, so the mean size counts.
    """
    batch: list[NarrowParameter] = []
    size = 0
    for item in narrow:
        shard = shard_of(item[0])
        elements = TENSORS_A_BATCH if shard is None else shard.shape.numel() // shard.shard_count
        if batch and size + elements > TENSORS_A_BATCH:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += elements
    if batch:
        yield batch


def write_all(updates: Iterable[Iterator[list[Write]]]) -> None:
    """Store updated tensors, in rounds; a collective for each computes the scales of all sharded ones."""
    for lists in zip_longest(*updates, fillvalue=()):
        writes = list(chain(*lists))
        sharing = [(to, x) for to, x, _ in writes if to.shares_scale]
        amaxes: Iterator[torch.Tensor] = iter(())
        if sharing:
            amaxes = iter(all_reduce_amaxes([x for _, x in sharing], [to.shard for to, _ in sharing]))
        for to, x, random in writes:
            to.write(x, random, amax=next(amaxes) if to.shares_scale else None)
