"""The results of a measured experiment as a file: a row for each run that has ended.

    arm,seed,rung,tokens,own_loss,bf16_loss,status

A row has the losses in nats per token, with six decimals, on the held-out tokens: with the arm's forward
pass, and with a bf16 forward pass of the same weights. A run that diverged has no losses.
"""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from narrowgauge.system.errors import UserError

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


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV.

    Raises:
        UserError: the file cannot be read, or is another table.
    """
    try:
        lines = list(csv.reader(path.read_text(encoding="utf-8").splitlines()))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}; name a runs.csv that `compare` wrote") from None
    if not lines or tuple(lines[0]) != COLUMNS:
        raise UserError(
            f"{path} does not begin with {','.join(COLUMNS)}; name a runs.csv that `compare` wrote"
        )
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            arm, seed, rung, tokens, own, bf16, status = line
            own_loss, bf16_loss = (float(x) if x else math.nan for x in (own, bf16))
            rows.append(Row(arm, int(seed), int(rung), int(tokens), own_loss, bf16_loss, status))
        except ValueError:
            raise UserError(f"{path}, line {number}: {','.join(line)!r} is not a row; correct it") from None
    return rows
