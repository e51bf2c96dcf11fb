"""Makes the results of docs/ladder2.md from the rows in docs/evidence/ladder2: `make ladder2`.

The same rows give the same bytes. Text outside the marks of the page is not changed.
"""

import sys
from pathlib import Path

from ladder2 import ROWS, read_parts
from narrowgauge.errors import UserError
from narrowgauge.files import write_whole
from narrowgauge.report.verdict.rungs import Row, read_rows
from publish.ladder2 import pilot_markdown, stages_markdown
from publish.predictions import read_predictions

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "ladder2.md"


def main() -> None:
    """Write the page."""
    predictions = read_predictions((HERE / "ladder2" / "predictions.md").read_text(encoding="utf-8"))
    text = PAGE.read_text(encoding="utf-8")
    text = _between("pilot", text, pilot_markdown(_rows_of("pilot")))
    text = _between("stages", text, stages_markdown(read_parts("stages"), _rows_of("stages"), predictions))
    write_whole(PAGE, text)
    print(f"{PAGE}, from the rows below {ROWS}")


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
