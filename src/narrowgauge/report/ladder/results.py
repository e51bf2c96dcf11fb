"""Results of a ladder as rows, one for each arm, seed and rung, in a CSV that says everything the page needs.

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
from pathlib import Path

from narrowgauge.errors import UserError
from narrowgauge.report.ladder.design import Ladder, RungRun
from narrowgauge.report.ladder.jobs import losses_of, state_of

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


def collect_rows(ladder: Ladder, out: Path) -> list[Row]:
    """The rows of the runs that are finished, by arm, seed and rung."""
    rows = []
    for chain in ladder.chains:
        for run in chain.runs:
            if (losses := _losses(out / run.name, run)) is not None:
                status = DIVERGED if math.isnan(losses[0]) else DONE
                rows.append(Row(chain.arm, chain.seed, run.rung, run.tokens, *losses, status))
    order = {arm: number for number, arm in enumerate(ladder.arms)}
    return sorted(rows, key=lambda row: (order[row.arm], row.seed, row.rung))


def _losses(directory: Path, run: RungRun) -> tuple[float, float] | None:
    """Both losses of a run, NaN if it diverged; None if it is not finished."""
    state = state_of(directory)
    if state == "diverged":
        return math.nan, math.nan
    if state != "done" or (losses := losses_of(run, directory)) is None:
        return None
    return losses if all(map(math.isfinite, losses)) else (math.nan, math.nan)


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
        UserError: the file cannot be read, or is no such table.
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
            raise UserError(f"{path}, line {number}: {','.join(line)!r} is no row; mend it") from None
    return rows
