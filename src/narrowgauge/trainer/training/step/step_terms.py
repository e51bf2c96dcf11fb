"""A step's figures besides the cross entropy: other terms of the objective, and each expert's tokens.

Experts compete for tokens: one that gets few learns little, and then gets fewer. Watch `busiest_expert` in
the metrics: the tokens of the busiest expert of any layer, divided by the mean. It is 1 at best, and
experts / experts_per_token if all tokens of a layer go to the same experts. The counts themselves are in the
gauges of the router, under the place `tokens`. All cover the full step, over all micro-batches and processes.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from narrowgauge.trainer.distributed import Engine
from narrowgauge.trainer.models import experts_of


def forget_tokens(engine: Engine) -> None:
    """Reset the token counts of experts."""
    for layer in experts_of(engine.model.blocks):
        layer.tokens_E = None


def step_terms(engine: Engine, total: torch.Tensor) -> tuple[float, dict[str, float], dict[str, list[int]]]:
    """The figures of a step, from this process's sum of losses. Collective.

    Returns:
        (cross entropy, further figures by name, tokens of each expert by layer).
    """
    figures = engine.sum_over_ranks(total.flatten().tolist())
    loss, *others = figures[-max(len(figures) - 1, 1) :]
    terms = dict(zip(("z_loss", "balance_loss"), others, strict=False))
    if not engine.model.z_loss:
        terms.pop("z_loss", None)
    if tokens := _tokens_of_experts(engine):
        terms["busiest_expert"] = max(max(row) * len(row) / max(sum(row), 1) for row in tokens.values())
    return loss, terms, tokens


def _tokens_of_experts(engine: Engine) -> dict[str, list[int]]:
    E = engine.model.config.experts
    if not E:
        return {}
    layers = [getattr(block, "experts", None) for block in engine.model.blocks]  # None: of another stage
    local = [[0] * E if x is None or x.tokens_E is None else x.tokens_E.tolist() for x in layers]
    total = engine.sum_over_ranks([float(n) for row in local for n in row])
    rows = (total[i * E : (i + 1) * E] for i in range(len(layers)))
    return {f"blocks.{i}.experts.router": [int(n) for n in row] for i, row in enumerate(rows)}


def token_lines(tokens: Mapping[str, Sequence[int]], step: int) -> Iterator[dict[str, Any]]:
    """One JSON-ready object for each layer of experts, like the objects of `nn.Gauges.lines`."""
    for layer, row in tokens.items():
        yield {"step": step, "layer": layer, "place": "tokens", "cast": None, "tokens": list(row)}
