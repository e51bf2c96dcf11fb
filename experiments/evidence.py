"""Makes the tables of ladder 1 in docs/evidence.md, and their picture: `make evidence`.

The same rows of docs/evidence/runs.csv give the same bytes. Text outside the two marks does not change.
"""

import json
import sys
from pathlib import Path

from narrowgauge.system.errors import UserError
from narrowgauge.system.files import write_whole
from narrowgauge.trainer.report.page.rungs import rungs_svg
from narrowgauge.trainer.report.verdict.verdict import read_rows, row_verdicts
from publish.page import asked_arms, results_markdown
from publish.predictions import read_predictions

DOCS = Path(__file__).parents[1] / "docs"
PAGE, ROWS, PROBE = DOCS / "evidence.md", DOCS / "evidence" / "runs.csv", DOCS / "evidence" / "probe.json"
RATES = DOCS / "evidence" / "rates.csv"
PREDICTIONS = Path(__file__).parent / "predictions.md"
PICTURE = DOCS / "images" / "evidence.svg"
BEGIN, END = (f"<!-- made by `make evidence`: {word} -->" for word in ("begin", "end"))
PARAMETERS = 851_968  # of ladder-1m, in linear layers without the head


def main() -> None:
    """Write the page and the picture."""
    rows = read_rows(ROWS)
    probe = json.loads(PROBE.read_text(encoding="utf-8")) if PROBE.exists() else None
    rates = read_rows(RATES) if RATES.exists() else []
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    predictions = read_predictions(PREDICTIONS.read_text(encoding="utf-8"))
    text = results_markdown(rows, predictions, f"images/{PICTURE.name}", probe, rates)
    write_whole(PAGE, f"{before}{BEGIN}\n\n{text}\n{END}{after}")
    results = row_verdicts(rows, family=asked_arms(predictions, rows), undecided="open")
    write_whole(PICTURE, rungs_svg(results, PARAMETERS, rows[0].arm))
    print(f"{PAGE} and {PICTURE}, from {len(rows)} rows of {ROWS}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"evidence: {error}")
