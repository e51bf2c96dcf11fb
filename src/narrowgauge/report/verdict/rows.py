"""Results of an experiment as rows, one for each arm, seed and rung, and as a CSV.

    arm,seed,rung,tokens,own_loss,bf16_loss,status

Losses are in nats a token, with six decimals, on the held-out tokens: under the arm's own forward pass, and
under a bf16 forward pass of the same weights. A run that diverged has no losses. Runs that are not finished
have no row.
"""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO

COLUMNS = ("arm", "seed", "rung", "tokens", "own_loss", "bf16_loss", "status")
DONE, DIVERGED = "done", "diverged"


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one run; NaN losses if it diverged."""

    arm: str
    seed: int
    rung: int
    tokens: int
    own_loss: float
    bf16_loss: float
    status: str

    def loss(self, which: str) -> float:
        """The loss called "own" or "bf16"."""
        return self.own_loss if which == "own" else self.bf16_loss


def rows_text(rows: Sequence[Row]) -> str:
    """The rows as the text of a CSV."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        losses = ["" if math.isnan(x) else f"{x:.6f}" for x in (row.own_loss, row.bf16_loss)]
        writer.writerow([row.arm, row.seed, row.rung, row.tokens, *losses, row.status])
    return text.getvalue()
