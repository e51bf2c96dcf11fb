"""The account of a model's matmul weights: what each computes in, and whether training reaches it.

Call it on a converted model between a backward pass and `zero_grad`, after it has computed a real step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from narrowgauge.nn.convert import plan_of
from narrowgauge.nn.linear import Linear
from narrowgauge.nn.transformer.outline import linear_layers, matmul_weights, why_left
from narrowgauge.quantization import Cast, has_gradient, state_of
from narrowgauge.recipes import Recipe, RecipeLike
from narrowgauge.system.errors import checked
from narrowgauge.system.result import text_table


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
