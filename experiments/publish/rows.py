"""Reads the rows of an experiment from the runs.csv that `narrowgauge compare` wrote."""

import csv
import math
from pathlib import Path

from narrowgauge.errors import UserError
from narrowgauge.report.verdict.rungs import COLUMNS, Row


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
            raise UserError(f"{path}, line {number}: {','.join(line)!r} is no row; mend it") from None
    return rows
