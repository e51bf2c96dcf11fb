"""A page of tables only, in one HTML file: no script and no network access; every text is escaped."""

from collections.abc import Sequence
from html import escape

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:75em;padding:0 1em}"
    "table{border-collapse:collapse;margin:1em 0}td,th{padding:.25em .7em;text-align:right;"
    "border-bottom:1px solid #ddd}td:first-child,th:first-child,td:last-child,th:last-child{text-align:left}"
    "svg{width:100%;height:auto}"
)


def plain_page(title: str, parts: Sequence[str], is_live: bool = False) -> str:
    """The page as a string; `title` is text, the parts are HTML. A live one loads itself again."""
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    head = f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
    head += '<meta http-equiv="refresh" content="4">' if is_live else ""
    head += f"<title>{escape(title)}</title><style>{_STYLE}</style>"
    text = "\n".join(parts)
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{text}</body></html>\n'


def html_table(head: Sequence[str], lines: Sequence[Sequence[str]], text: Sequence[str] | None = None) -> str:
    """A table of texts; columns not listed in `text` have the class "number"."""
    of = ["" if text is None or column in text else ' class="number"' for column in head]
    rows = ["".join(f"<th{kind}>{escape(cell)}</th>" for kind, cell in zip(of, head, strict=True))]
    rows += [
        "".join(f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(of, line, strict=True))
        for line in lines
    ]
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in rows) + "</table>"
