"""Puts a model under a recipe: replaces every linear layer by one that computes under the recipe.

If the recipe narrows attention or the residual stream, these are also replaced. That can be done only where
the model computes them in modules (`kernels.attention.Attention`, `kernels.residual.Residual`); other models
use plain functions.

`audit` is the account of a model's matmul weights: what each computes in, and whether training reaches it.
"""

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from narrowgauge.kernels.attention import Attention
from narrowgauge.kernels.residual import Residual
from narrowgauge.nn.linear import Linear
from narrowgauge.nn.self_test import verified_backend
from narrowgauge.nn.step_state import Conversion, stepped_modules
from narrowgauge.nn.transformer.outline import (
    is_conv1d,
    is_linear,
    linear_layers,
    matmul_weights,
    outline_of,
    reasons,
    stays,
    warn_of_left,
    why_left,
)
from narrowgauge.nn.transformer.places import NarrowAttention, NarrowResidual
from narrowgauge.nn.transformer.stacked_experts import is_stacked, require_plain_state, stacked
from narrowgauge.quantization import Cast, has_gradient, state_of
from narrowgauge.recipes import (
    ModelPlan,
    Outline,
    Recipe,
    RecipeLike,
    matches,
    nearest,
    require_matches,
    resolve,
)
from narrowgauge.recipes import recipe as recipe_named
from narrowgauge.system.errors import UserError, checked
from narrowgauge.system.result import text_table

WIDE_WEIGHT = {"weight": "fp32", "master": "none", "grad": "fp32", "gather": "fp32", "reduce": "fp32"}


@checked
def convert(
    model: torch.nn.Module,
    recipe: RecipeLike,
    keep: str | Sequence[str] = (),
    backend: str = "auto",
    also: Sequence[type[torch.nn.Module]] = (),
) -> torch.nn.Module:
    """Make the Linears of any module compute under a recipe; parameters stay the same objects.

    Args:
        model: Any module with `torch.nn.Linear`s, or Hugging Face `Conv1D`s (GPT-2); changed in place.
            Experts of transformers' mixtures, stacked in one parameter, are also converted.
        recipe: A recipe, its name, the path of its TOML file, or a dictionary with the keys of such a file.
        keep: Names or patterns of layers that stay in the recipe's `compute` format, in addition to those
            that the recipe keeps. A pattern is compared with the full name and with its last component;
            `head` is the layer that produces the model's output, whatever its name.
        backend: "auto" (native on a device that has the recipe's formats), "native", or "emulated".
        also: Subclasses of `torch.nn.Linear` with a forward method of their own that only multiplies, as
            nanochat's, which casts its weight to the dtype of the input: they are converted as well.

    Returns:
        The model itself. A model that is already under a recipe changes to the new one. `audit` lists what
        each layer computes in, before (`audit(model, recipe)`) and after; `kept_layers` what stays wide.

    Raises:
        UserError: The model has no linear layer, a `keep` pattern or a rule of the recipe matches none, a
            weight is computed from other tensors (`torch.nn.utils.parametrize`), a layer has more tensors
            than weight and bias, the backend is "native" and the model's device lacks the formats, the recipe
            narrows attention or the stream and the model has no such place, or the recipe keeps weights in
            casts and the weights of experts are stacked.

    Warns:
        UserWarning: More than a few of the model's matmul weights stay as they are (`warn_of_left`).
    """
    apply_plan(model, plan_of(model, recipe, keep, also=also), backend)
    warn_of_left(model)
    return model


def plan_of(
    model: torch.nn.Module,
    recipe: RecipeLike,
    keep: str | Sequence[str] = (),
    left_out: Container[str] = (),
    also: Sequence[type[torch.nn.Module]] = (),
) -> ModelPlan:
    """The recipe of each layer, as `convert` would apply it, except of the layers with some names."""
    recipe, keep = recipe_named(recipe), (keep,) if isinstance(keep, str) else keep
    outline = _outline(model, left_out, also)
    for pattern in keep:
        names = [*outline.layer_names, *outline.untouched]
        if not any(matches(name, pattern) for name in names):
            raise UserError(f"keep={pattern!r} matches no linear layer{nearest(pattern, names)}")
    require_matches(recipe, outline)
    return resolve(recipe.in_high_precision(keep) if keep else recipe, outline)


def apply_recipe(model: torch.nn.Module, recipe: Recipe, backend: str = "auto") -> torch.nn.Module:
    """Like `convert`, for part of a model: rules may name layers of the other parts."""
    apply_plan(model, resolve(recipe, _outline(model)), backend)
    return model


@checked
def kept_layers(model: torch.nn.Module) -> list[str]:
    """The names of the linear layers of a converted model whose matmuls no rule narrows at any time."""
    layers = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) or is_conv1d(m)}
    return [name for name, m in layers.items() if not (isinstance(m, Linear) and m.recipe.is_narrow)]


def _outline(
    model: torch.nn.Module, left_out: Container[str] = (), also: Sequence[type[torch.nn.Module]] = ()
) -> Outline:
    """The outline of a model to convert, except for some layers."""
    layers = linear_layers(model)
    stay = {name for name, layer in layers.items() if name in left_out or stays(name, layer, also)}
    if len(stay) < len(layers):
        return outline_of(model, stay)
    left = reasons(w for w in matmul_weights(model, also) if w.why)
    raise UserError(
        f"no torch.nn.Linear in {type(model).__name__} that a recipe could replace"
        f"{left and f' ({left})'}: convert the module that holds the linear layers, or name their subclass "
        "in convert(..., also=(Subclass,)) if its forward pass is a plain matmul"
    )


def apply_plan(model: torch.nn.Module, plan: ModelPlan, backend: str) -> None:
    """Put every layer of a plan, and the other places of its recipe, under it."""
    recipe = plan.recipe
    _refuse_unreachable(model, recipe)
    if recipe.times_state:
        raise UserError(
            f"a rule of recipe {recipe.name!r} changes state from a step on, which `narrowgauge train` does "
            "and convert does not; take the rule's time or its state away"
        )
    modules = dict(model.named_modules())
    stacks = {name: m for name, m in modules.items() if is_stacked(m)}
    for name in stacks:
        require_plain_state(recipe, name)
    layers = [m for m in modules.values() if is_linear(m)]
    for device in {layer.weight.device for layer in layers}:  # before anything is changed
        verified_backend(recipe, device, backend)
    _leave_fast_path(model)
    first = _convert_layers(model, plan, backend)
    for name, experts in stacks.items():
        first = stacked(experts).use(recipe, name, plan.parts, first, backend)
    _replace_places(model, recipe, plan.parts)
    conversion = Conversion()
    for name, module in stepped_modules(model).items():
        module.join(conversion, name)


def _convert_layers(model: torch.nn.Module, plan: ModelPlan, backend: str) -> int:
    """Put each layer under its recipe, in the order of their random streams; the number of layers.

    The layer stays the same object, so that whoever holds it, the caller included, holds the converted one.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    names = (name for name in plan.outline.layers if name in modules)  # others are of stacked experts
    layers: dict[str, Any] = {name: layer for name in names if is_linear(layer := modules[name])}
    named = (m.named_parameters(recurse=False, remove_duplicate=False) for m in model.modules())
    owners = Counter(p for parameters in named for _, p in parameters)
    for index, (name, layer) in enumerate(layers.items()):
        recipe = plan.parts[name]
        if owners[layer.weight] > 1:  # such as a head tied to an embedding
            recipe = recipe.with_places(WIDE_WEIGHT)
        before = torch.nn.Module.__new__(type(layer))
        before.__dict__, layer.__dict__ = vars(layer), {}
        layer.__class__ = Linear
        is_transposed = before.spec.transposed if isinstance(before, Linear) else is_conv1d(before)
        Linear.__init__(layer, before, recipe, index, is_transposed, plan.recipe, backend)
        layer.train(before.training)
    return len(layers)


def _leave_fast_path(model: torch.nn.Module) -> None:
    """Make torch's transformer encoder call its linear layers in evaluation as well."""
    for module in model.modules():
        if isinstance(module, torch.nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # the fast path needs relu or gelu
        elif isinstance(module, torch.nn.TransformerEncoder):
            module.use_nested_tensor = False


def _refuse_unreachable(model: torch.nn.Module, recipe: Recipe) -> None:
    """Refuse a recipe that narrows a place that the model does not expose as a module."""
    kinds = {type(module) for module in model.modules()}
    if recipe.narrows_attention and not any(issubclass(kind, Attention) for kind in kinds):
        raise UserError(
            f"recipe {recipe.name!r} narrows attention, and {type(model).__name__} computes its attention "
            "where no recipe reaches it (only narrowgauge's own model has these places); leave it wide: "
            f"narrowgauge.recipe({recipe.name!r}).with_places({{'attention': {recipe.compute!r}}})"
        )
    if recipe["stream"].name != "fp32" and not any(issubclass(kind, Residual) for kind in kinds):
        raise UserError(
            f"recipe {recipe.name!r} keeps the residual stream in {recipe['stream'].name!r}, and "
            f"{type(model).__name__} adds to it where no recipe reaches it (only narrowgauge's own model has "
            f"this place); take narrowgauge.recipe({recipe.name!r}).with_places({{'stream': 'fp32'}})"
        )


def _replace_places(model: torch.nn.Module, recipe: Recipe, resolved: Mapping[str, Recipe]) -> None:
    """Put attentions (each under its recipe in `resolved`) and points of the stream under a recipe."""
    for kind in (Attention, Residual):
        found = [(name, module) for name, module in model.named_modules() if isinstance(module, kind)]
        for index, (name, old) in enumerate(found):
            new: torch.nn.Module = kind()
            if kind is Attention and resolved[name].narrows_attention:
                new = NarrowAttention(resolved[name], index)
            elif kind is Residual and recipe["stream"].name != "fp32":
                new = NarrowResidual(recipe, index)
            if not (type(old) is type(new) is kind):  # a plain one stays the same object
                model.set_submodule(name, new.train(old.training))


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """One linear layer, or another weight of a matmul.

    Attributes:
        layer: The name of the layer, or of the weight.
        cast: The casts of the forward matmul's operands and of the stored weight; None if not converted.
        calls: The uncompiled forward passes since conversion; None if not converted.
        gradient: Whether a gradient of the weight waits for an optimizer; None for a frozen weight.
        note: What a reader should know; an empty string if nothing is unusual.
    """

    layer: str
    cast: str | None
    calls: int | None
    gradient: bool | None
    note: str


class Audit(list[AuditRecord]):
    """The records of a model's matmul weights; `str()` is the table."""

    @property
    def summary(self) -> str:
        """How many of the weights are converted, kept wide by the recipe, and left as they are."""
        converted = [r for r in self if r.cast is not None]
        kept = sum(r.note.startswith("kept in") for r in converted)
        left = len(self) - len(converted)
        return (
            f"converted {len(converted)} of {len(self)} ({kept} of them kept wide), left {left} as they are"
        )

    def __str__(self) -> str:
        """The records as a table, one line each, and the summary."""
        rows = [("layer", "cast", "calls", "gradient", "note")]
        rows += [(r.layer, r.cast or "-", _text(r.calls), _text(r.gradient), r.note) for r in self]
        return f"{text_table(rows)}\n{self.summary}"


@checked
def audit(
    model: torch.nn.Module,
    recipe: RecipeLike | None = None,
    keep: str | Sequence[str] = (),
    also: Sequence[type[torch.nn.Module]] = (),
) -> Audit:
    """List each matmul weight of a model: its casts, its calls, and whether a gradient reached it.

    Args:
        model: A model that `convert` has changed, after a backward pass and before its gradients are dropped;
            with a recipe, any model.
        recipe: A recipe to ask about before `convert`, which then takes the same arguments: the records say
            what each layer would compute in. Nothing is changed.
        keep: As in `convert`.
        also: As in `convert`.

    Returns:
        A record for each linear layer, converted or not, and for each other weight of a matmul, such as a
        convolution's. Notes name layers that no pass called or no gradient reached, and weights that other
        code reads.
    """
    layers = linear_layers(model) if recipe is None else {}
    records = [_record(name, layer) for name, layer in layers.items()]
    if recipe is not None:
        plan = plan_of(model, recipe, keep, also=also)
        for name in plan.outline.layers:
            part = plan.parts[name]
            note = f"kept in {part.compute}" if plan.recipe.is_narrow and not part.is_narrow else ""
            records.append(AuditRecord(name, _casts(part.casts, part), None, None, note))
    left = (w for w in matmul_weights(model, also) if w.why and w.name not in layers)
    return Audit(records + [AuditRecord(w.name, None, None, None, f"not converted: {w.why}") for w in left])


def _record(name: str, layer: torch.nn.Module) -> AuditRecord:
    weight = layer.weight
    assert isinstance(weight, torch.Tensor)
    gradient, reads = has_gradient(weight) if weight.requires_grad else None, state_of(weight).reads
    if not isinstance(layer, Linear):
        why = why_left(layer) or "it was added after the conversion"
        return AuditRecord(name, None, None, gradient, f"not converted: {why}")
    notes = {
        f"kept in {layer.recipe.compute}": layer.model_recipe.is_narrow and not layer.recipe.is_narrow,
        "never called": not layer.calls,
        "no gradient waits": gradient is False,
        "another parameter was put in place of the stored weight": layer.takes_other_parameter,
        f"other code read the weight {reads} times": reads > 0,
    }
    note = "; ".join(text for text, holds in notes.items() if holds)
    return AuditRecord(name, _casts(layer.spec.casts, layer.recipe), layer.calls, gradient, note)


def _casts(casts: Mapping[str, Cast], recipe: Recipe) -> str:
    """The casts of the forward matmul's operands and of the stored weight."""
    stored = recipe.state["weight"]
    weight = "" if stored is None or stored.name == "fp32" else f", weight {stored.name}"
    return f"{casts['fprop.x'].name} x {casts['fprop.w'].name}{weight}"


def _text(value: bool | int | None) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)
