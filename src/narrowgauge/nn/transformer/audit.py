"""The account of a converted model's layers: what each computes in, and whether training reaches it.

Call it between a backward pass and `zero_grad`, once the model has computed a real step.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from narrowgauge.nn.linear import Linear
from narrowgauge.nn.transformer.outline import linear_layers
from narrowgauge.nn.transformer.unreached import hidden_layers
from narrowgauge.quantization import has_gradient, state_of


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """One linear layer.

    Attributes:
        layer: The name of the layer.
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
    """The records of a model's linear layers; `str()` is the table."""

    def __str__(self) -> str:
        """The records as a table, one line each."""
        rows = [("layer", "cast", "calls", "gradient", "note")]
        rows += [(r.layer, r.cast or "-", _text(r.calls), _text(r.gradient), r.note) for r in self]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = ("  ".join([*map(str.ljust, row, widths), row[4]]).rstrip() for row in rows)
        return "\n".join(lines)


def audit(model: torch.nn.Module) -> Audit:
    """List each linear layer of a model with its casts, its calls and whether a gradient reached it.

    Args:
        model: A model that `convert` has changed, after a backward pass and before its gradients are dropped.

    Returns:
        A record for each linear layer, converted or not, and for each that lies in a plain Python list. Notes
        name layers that no pass called or no gradient reached, and weights that other code reads.
    """
    return Audit(_records(model))


def _records(model: torch.nn.Module) -> Iterator[AuditRecord]:
    for name, layer in linear_layers(model).items():
        if isinstance(layer, Linear):
            yield _of_converted(name, layer)
        else:
            assert isinstance(layer.weight, torch.Tensor)
            yield AuditRecord(name, None, None, _gradient(layer.weight), _why_not(layer))
    for name in hidden_layers(model):
        yield AuditRecord(name, None, None, None, "not converted: it lies in a plain Python list")


def _of_converted(name: str, layer: Linear) -> AuditRecord:
    casts, gradient = layer.spec.casts, _gradient(layer.weight)
    stored, notes = layer.recipe.state["weight"], []
    cast = f"{casts['fprop.x'].name} x {casts['fprop.w'].name}"
    if stored is not None and stored.name != "fp32":
        cast += f", weight {stored.name}"
    if layer.model_recipe.is_narrow and not layer.recipe.is_narrow:
        notes.append(f"kept in {layer.recipe.compute}")
    if not layer.calls:
        notes.append("never called")
    if gradient is False:
        notes.append("no gradient waits")
    if layer.takes_other_parameter:
        notes.append("another parameter was put in place of the stored weight")
    if reads := state_of(layer.weight).reads:
        notes.append(f"other code read the weight {reads} times")
    return AuditRecord(name, cast, layer.calls, gradient, "; ".join(notes))


def _gradient(weight: torch.Tensor) -> bool | None:
    return has_gradient(weight) if weight.requires_grad else None


def _why_not(layer: torch.nn.Module) -> str:
    if "forward" in vars(layer):
        return "not converted: its forward pass was replaced"
    if type(layer).forward is not torch.nn.Linear.forward and isinstance(layer, torch.nn.Linear):
        return f"not converted: {type(layer).__name__} overrides the forward pass"
    return "not converted: it was added after the conversion"


def _text(value: bool | int | None) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)
