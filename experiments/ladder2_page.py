"""Makes the tables of ladder 2 in docs/evidence.md from the rows in docs/evidence/ladder2: `make ladder2`.

The deviation that `compare` expects of runs without spikes (`report/verdict/quiet_warmup.toml`) is that of
the design QUIET, the one from scratch with initial weights by role. The same rows give the same bytes. Text
outside the marks of the page is not changed.
"""

import json
import sys
from pathlib import Path

from ladder2 import ROWS, read_parts
from narrowgauge.system.errors import UserError
from narrowgauge.system.files import write_whole
from narrowgauge.trainer.models import count_block_weights
from narrowgauge.trainer.report.verdict.verdict import Row, read_rows
from narrowgauge.trainer.runs.run_directory import PROBE
from narrowgauge.trainer.training import make_config
from publish.held_out import held_out_markdown, read_measured
from publish.ladder2 import pilot_markdown, stages_markdown
from publish.pilot import measure, quiet_warmup_toml
from publish.predictions import read_predictions
from publish.probed import probe_markdown

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "evidence.md"
PROBED = PAGE.parent / "evidence" / PROBE
QUIET = "role-scratch"
EXPECTED = HERE.parent / "src/narrowgauge/trainer/report/verdict/quiet_warmup.toml"


def main() -> None:
    """Write the page."""
    predictions = read_predictions((HERE / "ladder2" / "predictions.md").read_text(encoding="utf-8"))
    text = PAGE.read_text(encoding="utf-8")
    text = _between("pilot", text, pilot_markdown(_rows_of("pilot")))
    text = _between("held-out", text, held_out_markdown(read_measured(ROWS / "held-out.csv")))
    parts = read_parts("stages")
    rows = _rows_of("stages")
    text = _between("stages", text, stages_markdown(parts, rows, predictions))
    probe = json.loads(PROBED.read_text(encoding="utf-8"))
    text = _between("probe", text, probe_markdown(probe, rows))
    write_whole(PAGE, text)
    if expected := expected_text():
        write_whole(EXPECTED, expected)
    print(f"{PAGE} and {EXPECTED}, from the rows below {ROWS}")


def expected_text() -> str:
    """The deviation of the design QUIET as TOML; "" if it has no seed with all arms."""
    rows = _rows_of("pilot").get(QUIET, [])
    if (found := measure(QUIET, rows)) is None:
        return ""
    model = make_config({"model": read_parts("pilot")[QUIET]["model"]}).spec.model
    return quiet_warmup_toml(found, rows[0].tokens / count_block_weights(model))


def _rows_of(file: str) -> dict[str, list[Row]]:
    """The rows of each part of a file that has any, in the order of the file."""
    found = {name: ROWS / file / f"{name}.csv" for name in read_parts(file)}
    return {name: read_rows(path) for name, path in found.items() if path.exists()}


def _between(name: str, page: str, text: str) -> str:
    """The page with other text between the two marks of a part."""
    begin, end = (f"<!-- made by `make ladder2`: {name}, {word} -->" for word in ("begin", "end"))
    before, rest = page.split(begin)
    return f"{before}{begin}\n\n{text}\n{end}{rest.split(end)[1]}"


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"ladder2: {error}")
