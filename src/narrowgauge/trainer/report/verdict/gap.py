"""The gap of a run to another: the excess of its loss, in percent, at equal tokens.

Losses fall with every token, so they are compared at the last number of tokens at which both runs were
measured. A gap is meaningful only between runs with the same seed: they start from the same weights and
process the same tokens in the same order (`groups.references`).
"""

import math
from dataclasses import dataclass

from narrowgauge.system.units import human_count, signed_percent
from narrowgauge.trainer.report.read.run import FINAL_STEPS, Run

NOTHING = "-"


@dataclass(frozen=True)
class Gap:
    """The excess of a loss over another, the tokens of the comparison, and whether both runs end there."""

    percent: float
    nats: float
    tokens: int
    final: bool


def gap_to(run: Run, first: Run, by_validation: bool) -> Gap | None:
    """The gap of `run` to `first` at the last equal number of tokens; None if no number is equal.

    It compares validation losses, or means of the last 10 train losses at equal tokens. All pairs of a
    comparison take the same kind.
    """
    if by_validation:
        window, losses, reference = 1, _val_by_tokens(run), _val_by_tokens(first)
    else:
        window, losses, reference = FINAL_STEPS, _train_by_tokens(run), _train_by_tokens(first)
    equal = [tokens for tokens in losses if tokens in reference][-window:]
    base = sum(reference[tokens] for tokens in equal)
    if not base:
        return None
    excess = sum(losses[tokens] for tokens in equal) - base
    return Gap(
        100 * excess / base, excess / len(equal), equal[-1], final=equal[-1] == max(losses) == max(reference)
    )


def _val_by_tokens(run: Run) -> dict[int, float]:
    """Validation loss by tokens, without the one before training, which all runs share."""
    return {at.tokens: at.val_loss for at in run.validation if at.tokens > 0}


def _train_by_tokens(run: Run) -> dict[int, float]:
    return {at.tokens: at.loss for at in run.steps}


def format_loss(loss: float | None) -> str:
    """A loss with four decimals, "not finite", or "-" for None."""
    if loss is None:
        return NOTHING
    return f"{loss:.4f}" if math.isfinite(loss) else "not finite"


def format_gap(gap: Gap | None) -> str:
    """A signed percentage, with the tokens of the comparison if a run continued; "-" for None."""
    if gap is None:
        return NOTHING
    percent = signed_percent(gap.percent)
    return percent if gap.final else f"{percent} at {human_count(gap.tokens)}"
