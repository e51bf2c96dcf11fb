"""The HTML of pages: templates that escape every value, unless another template made it.

A page needs no network: its style stands in it, and a content security policy admits its own script alone, by
the script's hash. Names, settings and texts of runs are untrusted, so only the templates here write markup.
"""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

import jinja2
from markupsafe import Markup


@dataclass(frozen=True, slots=True)
class Table:
    """A table of texts whose first column names the rows."""

    label: str  # the accessible name
    head: Sequence[str]  # the names of the columns
    rows: Sequence[Sequence[str]]  # the cells of each row, which has the kind of its first cell
    text: Sequence[str] | None = ()  # columns of words; the others are aligned as numbers. None: all of words
    is_code: bool = False  # whether the names of the rows are code

    def is_number(self, column: int) -> bool:
        """Whether a column holds numbers."""
        return column > 0 and self.text is not None and self.head[column] not in self.text


def text_of(value: object) -> str:
    """A setting or a recorded value as a text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(text_of, value))
    if isinstance(value, int) and abs(value) >= 10_000:
        return f"{value:,}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def part(name: str, *values: object) -> Markup:
    """A part of a page: a macro of parts.html.jinja, filled with values."""
    macro = getattr(_templates().get_template("parts.html.jinja").module, name)
    return Markup(macro(*values))


def page(template: str = "base", javascript: str = "", **values: object) -> str:
    """A page in ASCII: of parts alone (`title`, `content`), or of a template with a script.

    One that `reloads` is loaded again every few seconds.
    """
    digest = base64.b64encode(hashlib.sha256(javascript.encode()).digest()).decode()
    policy = f"; script-src 'sha256-{digest}'" if javascript else ""
    values = {"reloads": False, "javascript": Markup(javascript)} | values
    values |= {"style": Markup(web_file("page.css")), "policy": Markup(policy)}
    html = _templates().get_template(f"{template}.html.jinja").render(values)
    return html.encode("ascii", "xmlcharrefreplace").decode()


def web_file(name: str) -> str:
    """The text of a script or style sheet."""
    return resources.files("narrowgauge.trainer.report.page").joinpath("web", name).read_text("ascii").strip()


@cache
def _templates() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("narrowgauge", "trainer/report/page/templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
