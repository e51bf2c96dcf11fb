"""What a question to narrowgauge returns: rows, a table, a picture where there is one, and files.

Every public function that measures, trains or plans returns a `Result`. It shows itself in one line (`repr`),
as a table (`print`, `table`), in a notebook, as rows for programs, and as a pandas DataFrame where pandas is
installed. `save` writes it in the form that the file's name ends in.
"""

import csv
import json
from collections.abc import Callable, Sequence
from html import escape
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowgauge.system.errors import UserError
from narrowgauge.system.files import write_whole

if TYPE_CHECKING:
    from rich.console import Console

Row = dict[str, Any]


class Result:
    """The base of results.

    A subclass gives `rows`, `as_json`, `__repr__`, `table` or what prints it (`show`), and `plot` if it has a
    picture.
    """

    def rows(self) -> list[Row]:
        """One dictionary for each row, all with the same keys."""
        raise NotImplementedError

    def table(self) -> str:
        """The result as text."""
        from rich.console import Console

        text = StringIO()
        self.show(Console(file=text, width=200, force_jupyter=False))
        return text.getvalue().rstrip("\n")

    def show(self, console: "Console") -> None:
        """Print the result on a terminal, as the verb of the command line does."""
        console.print(self.table(), markup=False, highlight=False, soft_wrap=True)

    def as_json(self) -> dict[str, Any]:
        """The result for programs, as JSON values."""
        raise NotImplementedError

    def plot(self) -> str:
        """An SVG of the result.

        Raises:
            UserError: There is no picture of this result.
        """
        raise UserError(f"there is no picture of {type(self).__name__}; print(RESULT) shows its table")

    def __str__(self) -> str:
        return self.table()

    def to_pandas(self) -> Any:
        """A DataFrame of `rows`.

        Raises:
            UserError: pandas is not installed.
        """
        try:
            pandas = import_module("pandas")
        except ImportError:
            raise UserError("to_pandas needs pandas; install it with: pip install pandas") from None
        return pandas.DataFrame(self.rows())

    def save(self, path: str | Path) -> Path:
        """Write the result to a file, as its name ends: .json, .csv, .txt, .html, or .svg for its picture.

        Returns:
            The path.

        Raises:
            UserError: The name ends otherwise, there is no picture, or the file cannot be written.
        """
        path = Path(path)
        writers = self.writers()
        if path.suffix not in writers:
            raise UserError(
                f"{path}: its name must end in {', '.join(writers)}, which decides what is written"
            )
        return write_result(path, writers[path.suffix]())

    def writers(self) -> dict[str, Callable[[], str]]:
        """What `save` writes, by the ending of a name."""
        writers: dict[str, Callable[[], str]] = {
            ".json": lambda: json.dumps(self.as_json(), indent=1) + "\n",
            ".csv": self._csv,
        }
        writers |= {} if type(self).plot is Result.plot else {".svg": self.plot}
        return writers | {".txt": lambda: self.table() + "\n", ".html": self.page}

    def _csv(self) -> str:
        """The rows as CSV, with a header."""
        text, rows = StringIO(), self.rows()
        writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()

    def page(self) -> str:
        """A small HTML page of the result, without outside requests."""
        return (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(repr(self))}</title>'
            f"<body>{self._repr_html_()}</body></html>\n"
        )

    def _repr_html_(self) -> str:
        """The view in a notebook: the picture, if there is one, and the rows as a table.

        Values are text, so nothing in them is markup.
        """
        picture, rows = self.plot() if type(self).plot is not Result.plot else "", self.rows()
        if not rows:
            return f"{picture}<p>no rows</p>"
        head = "".join(f"<th>{escape(str(key))}</th>" for key in rows[0])
        cells = ("".join(f"<td>{escape(_shown(value))}</td>" for value in row.values()) for row in rows)
        body = "".join(f"<tr>{row}</tr>" for row in cells)
        return f"{picture}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def write_result(path: Path, text: str) -> Path:
    """Write a file that a user has named, and return its path."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}; name another file") from None
    return path


def text_table(lines: Sequence[Sequence[str]]) -> str:
    """Lines of cells as columns of text, the first line their heads.

    >>> print(text_table([("recipe", "gap"), ("mxfp8", "+0.1 %")]))
    recipe  gap
    mxfp8   +0.1 %
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _shown(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
