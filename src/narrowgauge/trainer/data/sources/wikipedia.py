"""The articles of a MediaWiki dump (`pages-articles.xml.bz2`), or of WikiExtractor's files, as plain text.

The reader looks only for the ends of pages; the dump is decompressed while it is read, never to disk. A
worker parses each page separately with expat, so a broken page affects no other, and keeps articles: pages of
namespace 0 that are not redirects. The text of a document is the title, a blank line, and the plain text that
`wikitext` makes of the article. Schema: https://www.mediawiki.org/xml/export-0.11.xsd (older versions do not
differ in anything that is read here).

WikiExtractor has done that already: `<doc id= url= title=>`, the title, the text, `</doc>`.
"""

import codecs
import re
from collections.abc import Iterable, Iterator
from functools import partial
from xml.etree import ElementTree

from narrowgauge.trainer.data.sources.records import (
    ByteStream,
    Chunk,
    Input,
    Records,
    Rejected,
    TruncatedError,
    chunks_of,
    document,
)
from narrowgauge.trainer.data.sources.wikitext import DROPPED_NAMESPACES, prose

_PAGE, _END = re.compile(rb"<page[\s>]"), b"</page>"
_DOC, _DOC_END = re.compile(rb'\s*<doc [^>\n]*?title="([^"\n]*)"[^>\n]*>\n?'), b"</doc>"
_HEAD = 1 << 16  # bytes, decompressed, that hold the names of the namespaces of files and categories
_NAMESPACE = re.compile(r'<namespace key="(?:-2|6|14)"[^>]*>([^<]+)</namespace>')
_REDIRECT = re.compile(r"\s*#\s*\w+\s*:?\s*\[\[")


def extract_chunks(file: Input) -> Iterator[Chunk]:
    """A file of WikiExtractor's in portions of complete documents."""
    return chunks_of(ByteStream(file.path), _DOC_END, "begins a document", partial(_docs, str(file.path)))


def _docs(path: str, line: int, data: bytes) -> Records:
    """A document for each `<doc>`, named by its title; the first begins at or after the line `line`."""
    *parts, rest = data.split(_DOC_END)
    for part in parts:
        where, begin = f"{path}:{line}", _DOC.match(part)
        line += part.count(b"\n")
        if begin is None:
            yield Rejected(where, "is not followed by <doc ... title=...>")
            continue
        try:
            yield from document(where, begin[1].decode("utf-8"), part[begin.end() :].decode("utf-8"))
        except UnicodeDecodeError as error:
            yield Rejected(where, f"begins a document that is not UTF-8 ({error.reason})")
    if rest.strip():
        yield Rejected(f"{path}:{line}", "begins a document without </doc>")


def dump_chunks(file: Input) -> Iterator[Chunk]:
    """The dump in portions of complete pages."""
    stream = ByteStream(file.path)
    head, blocks = stream.head(_HEAD), iter(stream)
    encoding = "utf-8"
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):  # converted by a tool of Windows
        encoding = "utf-16"
        blocks = (text.encode("utf-8") for text in codecs.iterdecode(stream, encoding))
    names = _NAMESPACE.findall(head.decode(encoding, "replace"))
    parse = partial(_pages, str(file.path), DROPPED_NAMESPACES | {name.casefold() for name in names})
    return chunks_of(stream, _END, "begins a page", parse, _whole(blocks))


def _pages(path: str, dropped: frozenset[str], line: int, data: bytes) -> Records:
    """A document for each article; other pages are skipped. The first begins at or after the line `line`."""
    for page in data.split(_END)[:-1]:
        begin = _PAGE.search(page)
        before = begin.start() if begin else 0
        line += page.count(b"\n", 0, before)
        where = f"{path}:{line}"
        if begin is None:
            yield Rejected(where, "is not the beginning of a page")
        else:
            yield from _article(where, page[before:] + _END, dropped)
        line += page.count(b"\n", before)


def _article(where: str, page: bytes, dropped: frozenset[str]) -> Records:
    try:
        tree = ElementTree.fromstring(page)
    except ElementTree.ParseError as error:
        yield Rejected(where, f"begins a page that is not XML: {error}")
        return
    title, namespace = tree.findtext("title"), tree.findtext("ns")
    texts = tree.findall("revision/text")
    if title is None or namespace is None or not texts:
        missing = "title" if title is None else "ns" if namespace is None else "text"
        yield Rejected(where, f"begins a page without <{missing}>")
    elif namespace.strip() == "0" and tree.find("redirect") is None:
        text = texts[-1].text or ""
        model = tree.findtext("revision/model", "wikitext")
        if model == "wikitext" and not _REDIRECT.match(text):
            body = prose(text, dropped)
            yield from document(where, title, f"{title}\n\n{body}\n" if body else "")


def _whole(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """The blocks of a dump; an error after the last one if the dump does not end there."""
    head = tail = b""
    try:
        for block in blocks:
            head, tail = (head + block)[:4096], (tail + block)[-4096:]
            yield block
    except UnicodeDecodeError as error:
        raise TruncatedError(f"is followed by bytes that are not UTF-16 ({error.reason})") from None
    if head and b"<mediawiki" not in head:
        raise TruncatedError("does not begin with <mediawiki>, so it is not a dump")
    if b"</mediawiki>" not in tail:
        raise TruncatedError("ends before </mediawiki>, so it is truncated")
