"""Which number format is each tensor of a training step in? A `Recipe` says so, and is data.

A linear layer does three matrix multiplications a step, each with two operands. Legend: M tokens, K inputs,
N outputs.

    fprop   x_MK  @ w_NK.T  -> y_MN      places fprop.x,  fprop.w     contracts K
    dgrad   dy_MN @ w_NK    -> dx_MK     places dgrad.dy, dgrad.w     contracts N
    wgrad   dy_MN.T @ x_MK  -> dw_NK     places wgrad.dy, wgrad.x     contracts M

A recipe puts a `Cast` in each of these places and names the format of everything that is not narrow
(`compute`). A `Rule` puts other casts into some places of some layers, or from some time on: the layers that
are kept out are a rule, and so is a run that finishes in high precision. Later rules win.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from math import ceil
from typing import Any

from narrowgauge.errors import UserError, unknown
from narrowgauge.formats import torch_dtype
from narrowgauge.quantization import Cast, make_cast
from narrowgauge.recipes.wire import fitting_gather, require_gather, require_reduce

GEMMS = ("fprop", "dgrad", "wgrad")
GEMM_PLACES = ("fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x")
# What state is kept in unless a recipe says otherwise: of the weights of linear layers, and the moments of
# every large tensor. "none" = no second, wider copy of a weight.
STATE_PLACES = ("weight", "master", "grad", "m", "v")
FP32 = make_cast("fp32")
WIDE_STATE: Mapping[str, Cast | None] = dict.fromkeys(STATE_PLACES, FP32) | {"master": None}
WIRE_PLACES = ("gather", "reduce")  # between devices: weights of linear layers, and their gradients
PLACES = (*GEMM_PLACES, "saved", *STATE_PLACES, *WIRE_PLACES)
OFFLOADABLE = ("master", "grad", "m", "v")
KEYS = (*PLACES, "offload", "compute")  # what may be set over a recipe
COMPUTE = ("bf16", "fp16", "fp32")
# What may be kept of a layer's input for its backward pass, beside the name of a cast.
SAVED = ("input", "operand")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Other casts in some layers, or from some time on.

    Attributes:
        casts: the cast of each place that the rule changes.
        keeps_state: whether weights, masters and gradients of the layers that it selects stay in fp32, on the
            wire too.
        modules: patterns of module names, compared with the whole name and with its last component.
        first_blocks, last_blocks: blocks of the model's longest module list: a float is a share of them,
            rounded up, an integer their number. A layer is meant if any of the three selects it; all empty =
            every layer.
        from_step: the first optimizer step (from 1) in which the rule holds.
        from_share: the share of the run's steps after which it holds.
    """

    casts: Mapping[str, Cast]
    keeps_state: bool = False
    modules: tuple[str, ...] = ()
    first_blocks: float = 0
    last_blocks: float = 0
    from_step: int = 0
    from_share: float = 0.0

    def selects(self, name: str, block: int | None, blocks: int) -> bool:
        """Whether the layer called `name`, in block number `block` of `blocks`, is meant."""
        if self.is_for_all:
            return True
        if any(matches(name, pattern) for pattern in self.modules):
            return True
        if block is None:
            return False
        first, last = _count(self.first_blocks, blocks), _count(self.last_blocks, blocks)
        return block < first or block >= blocks - last

    @property
    def is_for_all(self) -> bool:
        """Whether it means every layer."""
        return not (self.modules or self.first_blocks or self.last_blocks)

    @property
    def is_timed(self) -> bool:
        """Whether it waits for a step."""
        return self.from_step > 1 or self.from_share > 0

    def holds(self, step: int, steps: int | None) -> bool:
        """Whether it holds in an optimizer step of a run of `steps` steps (None = of unknown length)."""
        if self.from_share and (steps is None or step <= self.from_share * steps):
            return False
        return step >= self.from_step


def matches(name: str, pattern: str) -> bool:
    """Whether a module's name, or its last component, fits a pattern."""
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[2], pattern)


def _count(requested: float, blocks: int) -> int:
    # 0.28 * 25 is 7.000000000000001
    return requested if isinstance(requested, int) else ceil(round(requested * blocks, 6))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A number format for every place.

    Attributes:
        name: what it is called.
        title: one line for people.
        source: paper, specification or library it follows.
        compute: "bf16", "fp16" or "fp32": GEMM results, and everything a recipe does not narrow.
        casts: the cast of each of the six GEMM places.
        saved: what is kept of the input for the backward pass: "input" (as it came), "operand" (the numbers
            of fprop.x, in the bytes of their format), or a cast.
        state: the cast of each state place; None for a master that does not exist.
        gather: of weights, where devices that hold a share each bring them together (`wire.py`).
        reduce: of the weights' gradients, where devices add up theirs.
        offload: the state places that lie in the host's memory while a GPU computes.
        rules: other casts in some layers or from some time on; later ones win.
        text: the TOML it was read from.
    """

    name: str
    title: str
    source: str
    compute: str
    casts: Mapping[str, Cast]
    saved: str | Cast = "input"
    state: Mapping[str, Cast | None] = field(default_factory=lambda: dict(WIDE_STATE))
    gather: Cast = FP32
    reduce: Cast = FP32
    offload: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()
    text: str = ""

    def __post_init__(self) -> None:
        require_products(self.casts, f"recipe {self.name!r}")
        for number, rule in enumerate(self.rules, start=1):
            require_products({**self.casts, **rule.casts}, f"recipe {self.name!r}, rule {number}")
        x = self.casts["fprop.x"]
        if self.saved == "operand" and (x.hadamard or x.outliers):
            raise UserError(
                f"recipe {self.name!r}: saved = 'operand', but fprop.x is transformed or without its "
                "outliers, so its numbers are not the tensor's; save 'input', or a cast"
            )
        require_state(self.state, f"recipe {self.name!r}")
        require_gather(self.gather, self.weight_operands, self.state["weight"], f"recipe {self.name!r}")
        require_reduce(self.reduce, f"recipe {self.name!r}")

    @property
    def weight_operands(self) -> tuple[Cast, ...]:
        """What products see of a weight at any time, in layers that no rule selects by name or block."""
        rules = [r.casts for r in self.rules if r.is_for_all]
        return tuple(c[place] for c in (self.casts, *rules) for place in ("fprop.w", "dgrad.w") if place in c)

    @property
    def is_narrow(self) -> bool:
        """Whether any GEMM operand is narrower than `compute`."""
        every = [*self.casts.values(), *(c for rule in self.rules for c in rule.casts.values())]
        return any(c.name != self.compute for c in every)

    @property
    def has_plain_weights(self) -> bool:
        """Whether weights and their gradients are ordinary fp32 parameters."""
        return self.state["weight"] == self.state["grad"] == make_cast("fp32")

    def for_layer(self, names: Sequence[tuple[str, int | None]], blocks: int) -> "Recipe":
        """The recipe of one layer: rules that select it are merged in, those that wait for a step remain.

        `names` are the layer's (one that stands in a model twice has two), each with the number of the block
        it lies in, out of `blocks`.
        """
        casts, reduce = dict(self.casts), self.reduce
        rules = [r for r in self.rules if any(r.selects(name, block, blocks) for name, block in names)]
        while rules and not rules[0].is_timed:
            casts |= rules.pop(0).casts
        state = dict(self.state)
        if any(r.keeps_state for r in self.rules if any(r.selects(n, block, blocks) for n, block in names)):
            state |= {place: WIDE_STATE[place] for place in ("weight", "master", "grad")}
            reduce = FP32
        for rule in rules:  # those that do not wait, but come after one that does, stay and win over it
            casts |= {} if rule.is_timed else rule.casts
        whole = (replace(r, modules=(), first_blocks=0, last_blocks=0) for r in rules)
        return self._with(casts=casts, rules=tuple(whole), state=state, reduce=reduce)

    def _with(self, **changes: Any) -> "Recipe":
        """With other fields, and weights gathered in what still fits unless that is one of them."""
        if "gather" not in changes:
            free = replace(self, **changes, gather=FP32)
            changes["gather"] = fitting_gather(self.gather, free.weight_operands, free.state["weight"])
        return replace(self, **changes)

    def in_high_precision(self, modules: Sequence[str] = ()) -> "Recipe":
        """This recipe with every place of some modules (none named: of all) in `compute`, at any time."""
        wide = dict.fromkeys(GEMM_PLACES, make_cast(self.compute))
        kept = Rule(casts=wide, keeps_state=True, modules=tuple(modules))
        return self._with(rules=(*self.rules, kept))

    def with_places(self, places: Mapping[str, Any]) -> "Recipe":
        """This recipe with other casts in some places, as `--recipe.fprop.x bf16` asks for.

        Raises:
            UserError: unknown place or cast, a cast that the place cannot have, or two operands of a
                product that do not go together.
        """
        casts, saved, state, offload = dict(self.casts), self.saved, dict(self.state), self.offload
        compute = self.compute
        wire = {place: _cast_in(place, places[place]) for place in WIRE_PLACES if place in places}
        for place, value in places.items():
            if place == "saved":
                saved = saved_from(value)
            elif place == "offload":
                offload = offload_from(value)
            elif place == "compute":
                compute = value
                if compute not in COMPUTE:
                    raise unknown("compute format", str(compute), COMPUTE)
            elif place in STATE_PLACES:
                state[place] = None if place == "master" and value == "none" else _cast_in(place, value)
            elif place not in WIRE_PLACES:
                casts |= casts_from(place, value)
        changes = {"casts": casts, "saved": saved, "state": state, "offload": offload, "compute": compute}
        return self._with(**changes, **wire)


def casts_from(place: str, value: Any) -> dict[str, Cast]:
    """The casts that a recipe's text puts in a place; the name of a GEMM is both of its operands."""
    if place in GEMMS:
        operands = (p for p in GEMM_PLACES if p.startswith(f"{place}."))
        return {p: c for operand in operands for p, c in casts_from(operand, value).items()}
    if place not in GEMM_PLACES:
        raise unknown("recipe place", place, (*PLACES, *GEMMS))
    cast = _cast_in(place, value)
    if cast.is_for_state:
        raise UserError(
            f"recipe place {place!r}: cast {cast.name!r} is for state ({', '.join(STATE_PLACES)}), not for "
            "an operand of a product; use one of those that `narrowgauge recipes` shows, such as e4m3"
        )
    return {place: cast}


def offload_from(value: Any) -> tuple[str, ...]:
    """The places that a recipe's text keeps on the host: a list, or words with commas between them."""
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(n, str) for n in names):
        raise UserError(f'offload = {value!r}, but it must be a list of places such as ["master", "m", "v"]')
    names = [n.strip() for n in names if n.strip() not in ("", "none")]
    for name in names:
        if name not in OFFLOADABLE:
            raise unknown("place to offload", name, OFFLOADABLE)
    return tuple(p for p in OFFLOADABLE if p in names)


def saved_from(value: Any) -> str | Cast:
    """What a recipe's text keeps for the backward pass."""
    return value if isinstance(value, str) and value in SAVED else _cast_in("saved", value)


def _cast_in(place: str, value: Any) -> Cast:
    if not isinstance(value, str | Mapping):
        raise UserError(
            f'recipe place {place!r} = {value!r}, but it must be a cast such as "mxfp4", or a table such as '
            '{cast = "mxfp4", rounding = "stochastic"}'
        )
    try:
        return make_cast(value)
    except UserError as error:
        raise UserError(f"recipe place {place!r}: {error}") from None


def require_state(state: Mapping[str, Cast | None], where: str) -> None:
    """Refuse state that cannot be: casts of operands only, weights without a dtype, a master of nothing."""
    for place, cast in state.items():
        if cast is None:
            continue
        if cast.hadamard or cast.outliers or cast.history:
            raise UserError(
                f"{where}: hadamard, outliers and history in place {place!r}, but they belong to operands of "
                "a product; remove the key"
            )
        if cast.prescale and place != "grad":
            raise UserError(f"{where}: prescale in place {place!r}, but it belongs to grad; remove the key")
    weight, master = state["weight"], state["master"]
    assert weight is not None
    is_table = weight.expand or weight.codebook
    if torch_dtype(weight.element) is None or is_table or weight.scale not in ("none", "fp32"):
        raise UserError(
            f"{where}: weight = {weight.name!r}, but a weight needs a format that torch can hold and fp32 "
            "scales, such as bf16, fp16-scaled or e4m3"
        )
    if master is not None and weight.name == "fp32":
        raise UserError(
            f"{where}: master = {master.name!r} beside weights in fp32, but a master is a wider copy of "
            'narrow weights; narrow the weight, or write master = "none"'
        )


def require_products(casts: Mapping[str, Cast], where: str) -> None:
    """Refuse operands that cannot be multiplied: a transform has to stand on both or on none."""
    for a, b in zip(GEMM_PLACES[::2], GEMM_PLACES[1::2], strict=True):
        if casts[a].hadamard != casts[b].hadamard or casts[a].signs != casts[b].signs:
            raise UserError(
                f"{where}: hadamard = {casts[a].hadamard} in {a} and {casts[b].hadamard} in {b}, but the "
                "product stays the same only if both operands are transformed alike; "
                "give both places the same size and signs"
            )
