"""Converts wikitext to plain text.

It makes one pass over the brackets and one over the lines, so time grows with the length of the text and not
with its nesting:

1. *Brackets.* Templates `{{..}}`, links `[[..]]`, tables `{|..|}` and HTML tables nest in each other. Each
   opening pushes a new list of pieces on a stack. Its end pops the list and appends what remains to the outer
   one: the text of a link, and nothing of a template, table, file or category. Comments, and tags whose
   content is not wikitext (`<ref>`, `<math>`, `<nowiki>`), are skipped from start to end at once.
2. *Lines.* Headings lose their signs, list items their bullets; a heading with nothing below it is dropped.

A bracket that is not closed is treated as if it had not been opened, as in MediaWiki, and is dropped.
Syntax: https://www.mediawiki.org/wiki/Help:Formatting and the pages it links to.
"""

import html
import re

# The English names of the file and category namespaces; a dump lists the names in its language.
DROPPED_NAMESPACES = frozenset(["file", "image", "media", "category"])

HOLE = "\x00"  # where a template was: blanks and brackets around it may have to be removed
KEPT = "\x01"  # around the number of a literal text
_MOST_LINKS = 16  # nesting depth: a deeper bracket is not a link

_TOKEN = re.compile(
    r"\{\{+|\}\}+|\[\[|\]\]|^[ \t:*#]*+\{\|(?!\})|^[ \t]*+\|\}(?!\})|<!--"
    r"|<(?P<close>/?)(?P<tag>[a-zA-Z]++)[^<>]*+>",
    re.MULTILINE,
)
_MEDIA = re.compile(
    r"\.(?:jpe?g|png|svg|gif|tiff?|webp|og[agv]|webm|pdf|djvu|midi?|wav|mp[34]|flac)\s*$", re.I
)
_INTERLANGUAGE = re.compile(r"(?:[a-z]{2,3}(?:-[a-z]{2,}){0,2}|simple)\Z")
_VARIANT = re.compile(r"-\{([^{}]*+)\}-")


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Tags that are dropped with their content; tags whose content is literal text; tags that begin a new line;
# and tags that are removed without their content.
_DROPPED = _names(
    "ref math chem ce gallery timeline syntaxhighlight source score imagemap graph mapframe maplink hiero "
    "templatestyles templatedata inputbox categorytree includeonly style script references indicator"
)
_LITERAL = frozenset(["nowiki", "pre"])
_BREAKS = _names("br hr p div li ul ol dl dt dd blockquote center poem h1 h2 h3 h4 h5 h6 section")
_BARE = _names(
    "b i u s em strong small big sub sup span font tt code var samp kbd cite q abbr del ins strike bdi bdo "
    "noinclude onlyinclude nobr ruby rt rp rb dfn mark time wbr data tr td th tbody thead caption a"
)


def prose(text: str, dropped: frozenset[str] = DROPPED_NAMESPACES) -> str:
    """The plain text of a page: paragraphs, headings and list items, without markup.

    Links into the namespaces `dropped` (lower case) are removed with their text.
    """
    scan = _Scan(text.replace(HOLE, "").replace(KEPT, ""), dropped)
    flat = _VARIANT.sub(_variant, scan.run())
    return _tidy(flat, scan.literals)


class _Scan:
    """The stack of open brackets; `out` is the list of pieces of the innermost one."""

    def __init__(self, text: str, dropped: frozenset[str]) -> None:
        self.text, self.dropped = text, dropped
        self.out: list[str] = []
        self.stack: list[tuple[str, list[str]]] = []
        self.open = {"{{": 0, "[[": 0, "{|": 0, "<table": 0}
        self.literals: list[str] = []

    def run(self) -> str:
        """The text without the content of brackets and tags."""
        text, at = self.text, 0
        while match := _TOKEN.search(text, at):
            self.out.append(text[at : match.start()])
            token = match[0]
            at = match.end()
            if token.endswith("{|"):
                self._push("{|")
            elif token[0] == "{":
                for _ in range(len(token) // 2):
                    self._push("{{")
            elif token[0] == "}":
                for _ in range(len(token) // 2):
                    if self._close("{{") and not self.stack:
                        self.out.append(HOLE)
            elif token == "[[":
                if self.open["[["] < _MOST_LINKS:
                    self._push("[[")
            elif token == "]]":
                self._close_link()
            elif token == "<!--":
                end = text.find("-->", at)
                at = end + 3 if end >= 0 else len(text)
            elif match["tag"]:
                at = self._tag(match, at)
            else:
                self._close("{|")
        self.out.append(text[at:])
        lists = [out for _, out in self.stack] + [self.out]
        return "".join(piece for pieces in lists for piece in pieces)

    def _push(self, bracket: str) -> None:
        self.stack.append((bracket, self.out))
        self.open[bracket] += 1
        self.out = []

    def _close(self, bracket: str) -> bool:
        """Drop the innermost `bracket` with everything open inside it; returns whether there is one."""
        if not self.open[bracket]:
            return False
        while True:
            top, self.out = self.stack.pop()
            self.open[top] -= 1
            if top == bracket:
                return True

    def _close_link(self) -> None:
        if not self.stack or self.stack[-1][0] != "[[":
            return
        inside = "".join(self.out)
        self.out = self.stack.pop()[1]
        self.open["[["] -= 1
        self.out.append(_link(inside, self.dropped))

    def _tag(self, match: re.Match[str], at: int) -> int:
        """Append what a tag leaves behind; returns the position after it."""
        name, closing, alone = match["tag"].lower(), bool(match["close"]), match[0].endswith("/>")
        if name == "table":
            if closing:
                self._close("<table")
            elif not alone:
                self._push("<table")
        elif name in _DROPPED or name in _LITERAL:
            if not (closing or alone) and (end := _end_of(name, self.text, at)):
                if name in _LITERAL:
                    self.out.append(f"{KEPT}{len(self.literals)}{KEPT}")
                    self.literals.append(html.unescape(self.text[at : end.start()]))
                return end.end()
        elif name in _BREAKS:
            self.out.append("\n")
        elif name not in _BARE:
            self.out.append(match[0])
        return at


_ENDS: dict[str, re.Pattern[str]] = {
    name: re.compile(rf"<(?:(?P<end>/){name}\s*+>|{name}(?=[\s>]))", re.IGNORECASE)
    for name in _DROPPED | _LITERAL
}


def _end_of(name: str, text: str, at: int) -> re.Match[str] | None:
    """The end tag, unless the same tag opens again before it: then this one was never closed."""
    match = _ENDS[name].search(text, at)
    return match if match and match["end"] else None


def _link(inside: str, dropped: frozenset[str]) -> str:
    target, pipe, shown = inside.partition("|")
    space, colon, _ = target.partition(":")
    if colon:
        space = space.strip()
        if not space:  # [[:Category:Rivers]] is a visible link to the category
            return shown if pipe else target.lstrip(" :")
        if space.casefold() in dropped or _MEDIA.search(target):
            return ""
        if not pipe and _INTERLANGUAGE.match(space):
            return ""
    return shown if pipe else target


def _variant(match: re.Match[str]) -> str:
    """The first of two scripts of the same text, as in `-{zh-hans:a; zh-hant:b}-`."""
    first = match[1].partition(";")[0]
    return first.partition(":")[2] if ":" in first and ";" in match[1] else first


# The lines of a page without brackets: headings, lists, emphasis, entities, gaps left by templates.

_QUOTES = re.compile(r"'{2,}")
_EXTERNAL = re.compile(
    r"\[(?:(?:https?|ftps?|irc|news|mailto|tel|geo)://?|mailto:|//)[^\s\[\]]*+\s*+([^\[\]\n]*+)\]"
)
_MAGIC = re.compile(r"__([^\W\d_]+(?:_[^\W\d_]+)*)__")
_BLANKS = re.compile(r"[ \t\xa0]+")
_KEPT = re.compile("\x01([0-9]+)\x01")

# The traces of a template: empty brackets, separators and blanks around the gap.
# Each pattern consumes a run of blanks once, so long runs are cheap.
_GAPS = [
    (re.compile(r"\((?=[ ,;:\u2013-]*+\x00)[ ,;:\x00\u2013-]*+\)"), "\x00"),
    (re.compile(r"\([ ,;:]*+\x00[ ,;:\x00]*+"), "("),
    (re.compile(r"(?<![ ,;:\x00])(?=[ ,;:]*+\x00)[ ,;:\x00]++\)"), ")"),
    (re.compile(r"(?<![ \x00])(?= *+\x00)[ \x00]++(?=[,.;:!?])"), ""),
]
_HOLE = re.compile(r" ?\x00[ \x00]*+")


def _tidy(text: str, literals: list[str]) -> str:
    """Format paragraphs and headings with a blank line between them, and list items a line each.

    `literals[k]` replaces the k-th literal text of a page without brackets.
    """
    text = _QUOTES.sub(_quotes, text)
    text = _EXTERNAL.sub(r"\1", text)
    text = _MAGIC.sub(lambda match: "" if match[1].isupper() else match[0], text)
    text = _BLANKS.sub(" ", html.unescape(text) if "&" in text else text)
    for pattern, instead in _GAPS if HOLE in text else ():
        text = pattern.sub(instead, text)
    text = _HOLE.sub(lambda match: " " if " " in match[0] else "", text)
    joined = "\n".join(_lines(text))
    return _KEPT.sub(lambda match: literals[int(match[1])], joined)


def _quotes(match: re.Match[str]) -> str:
    """Two, three and five quotes mean italics, bold and both; other numbers are apostrophes."""
    count = len(match[0])
    return "'" if count == 4 else "'" * max(count - 5, 0)


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
