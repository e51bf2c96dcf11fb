"""How far gaps deviate because the held-out tokens are few.

Two runs are validated on the same tokens, but what separates them differs from token to token. With d_j the
difference of their losses on part j of m equal parts, the sampling error of the gap is

    stdev(d_j) / sqrt(m) / reference loss

It is a share of the deviation between seeds. More seeds average it away as well, at the price of whole
trainings; more held-out tokens cost a forward pass each, and n times as many divide it by sqrt(n). In
ladder 2 (docs/evidence.md) the gaps of 8-bit arms deviate by 0.10 % on 65,536 tokens, of which 0.06 % is this
error, and by 0.06 % on 16 times as many.
"""

import math
import statistics
from collections.abc import Sequence

from narrowgauge.trainer.report.read.run import Run
from narrowgauge.trainer.report.verdict.groups import groups, references

LEAST_PARTS = 4


def sampling_error(runs: Sequence[Run]) -> float | None:
    """The error of gaps from their held-out tokens in percent; None without pairs on the same tokens.

    It is the root mean square over all pairs.
    """
    reference_of, errors = references(groups(runs)), []
    for run in runs:
        reference = reference_of.get(id(run))
        mine, base = run.final_validation, None if reference is None else reference.final_validation
        if mine is None or base is None or (mine.tokens, mine.held_out) != (base.tokens, base.held_out):
            continue
        if len(mine.parts) == len(base.parts) >= LEAST_PARTS:
            errors.append(error_percent(mine.parts, base.parts, base.val_loss))
    errors = [error for error in errors if math.isfinite(error)]
    return math.hypot(*errors) / math.sqrt(len(errors)) if errors else None


def error_percent(losses: Sequence[float], reference: Sequence[float], loss: float) -> float:
    """The sampling error of a gap in percent of `loss`; NaN if a loss is not finite.

    Args:
        losses: The losses of a run on four or more equal parts of its held-out tokens.
        reference: The reference's losses on the same parts.
        loss: The reference's loss on all parts.
    """
    differences = [a - b for a, b in zip(losses, reference, strict=True)]
    if not all(map(math.isfinite, differences)) or not loss:
        return math.nan
    return 100 * statistics.stdev(differences) / math.sqrt(len(differences)) / loss
