"""The lines of a page without brackets: headings, lists, emphasis, entities, gaps left by templates."""

import html
import re

_QUOTES = re.compile(r"'{2,}")
_EXTERNAL = re.compile(
    r"\[(?:(?:https?|ftps?|irc|news|mailto|tel|geo)://?|mailto:|//)[^\s\[\]]*+\s*+([^\[\]\n]*+)\]"
)
_MAGIC = re.compile(r"__([^\W\d_]+(?:_[^\W\d_]+)*)__")
_BLANKS = re.compile(r"[ \t\xa0]+")
_LITERAL = re.compile("\x01([0-9]+)\x01")

# The traces of a template: empty brackets, separators and blanks around the gap.
_EMPTY = re.compile(r"\([ ,;:\x00\u2013-]*+\)")
_HOLE_FIRST = re.compile(r"\([ ,;:]*+\x00[ ,;:\x00]*+")
_HOLE_LAST = re.compile(r"(?<![ ,;:\x00])[ ,;:\x00]++\)")
_HOLE_BEFORE = re.compile(r"(?<![ \x00])[ \x00]++(?=[,.;:!?])")
_HOLE = re.compile(r" ?\x00[ \x00]*+")


def tidy(text: str, literals: list[str]) -> str:
    """Format paragraphs and headings with a blank line between them, and list items a line each.

    `literals[k]` replaces the k-th literal text of a page without brackets.
    """
    text = _QUOTES.sub(_quotes, text)
    text = _EXTERNAL.sub(r"\1", text)
    text = _MAGIC.sub(lambda match: "" if match[1].isupper() else match[0], text)
    text = _BLANKS.sub(" ", html.unescape(text) if "&" in text else text)
    if "\x00" in text:
        text = _fill(text)
    joined = "\n".join(_lines(text))
    return _LITERAL.sub(lambda match: literals[int(match[1])], joined)


def _quotes(match: re.Match[str]) -> str:
    """Two, three and five quotes mean italics, bold and both; other numbers are apostrophes."""
    count = len(match[0])
    return "'" if count == 4 else "'" * max(count - 5, 0)


def _fill(text: str) -> str:
    """Close the gaps; each pattern consumes a run of blanks once, so long runs are cheap."""
    for pattern, instead in ((_EMPTY, "\x00"), (_HOLE_FIRST, "("), (_HOLE_LAST, ")"), (_HOLE_BEFORE, "")):
        text = _sub_at_holes(pattern, instead, text)
    return _HOLE.sub(lambda match: " " if " " in match[0] else "", text)


def _sub_at_holes(pattern: re.Pattern[str], instead: str, text: str) -> str:
    return pattern.sub(lambda match: instead if "\x00" in match[0] else match[0], text)


def _lines(text: str) -> list[str]:
    lines, headings = list[str](), list[tuple[int, str]]()
    blank = False
    for raw in text.split("\n"):
        line = raw.strip(" \t")
        if line.startswith("=") and line.endswith("=") and (title := line.strip("=").strip(" ")):
            level = len(line) - len(line.lstrip("="))
            while headings and headings[-1][0] >= level:  # nothing was below it
                headings.pop()
            headings.append((level, title))
            continue
        line = _without_bullet(line)
        if not line:
            blank = True
            continue
        for _, title in headings:
            lines += ["", title]
        if lines and (blank or headings):
            lines.append("")
        lines.append(line)
        headings, blank = [], False
    return lines[1:] if lines and not lines[0] else lines


def _without_bullet(line: str) -> str:
    """The line without its bullet; empty for a table row or a line without letters and digits."""
    if line.startswith(("*", "#", ":", ";", "----")):
        line = line.lstrip("*#:;-").lstrip(" ")
    elif line.startswith("|"):  # from a table or template that was never closed
        return ""
    return line if "\x01" in line or any(map(str.isalnum, line)) else ""
