"""The articles of a MediaWiki dump (`pages-articles.xml.bz2`), as plain text.

The reader looks only for the ends of pages; the dump is decompressed while it is read, never to disk. A
worker parses each page separately with expat, so a broken page affects no other, and keeps articles: pages of
namespace 0 that are not redirects. The text of a document is the title, a blank line, and the plain text that
`wikitext` makes of the article. Schema: https://www.mediawiki.org/xml/export-0.11.xsd (older versions do not
differ in anything that is read here).
"""

import codecs
import re
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from xml.etree import ElementTree

from narrowgauge.trainer.data.sources.byte_stream import ByteStream, TruncatedError, chunks_of
from narrowgauge.trainer.data.sources.records import Chunk, Input, Records, Rejected, document
from narrowgauge.trainer.data.sources.wikipedia.wikitext import DROPPED_NAMESPACES, prose

_END = b"</page>"
_HEAD = 1 << 16  # bytes, decompressed, that hold the names of namespaces
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_PAGE = re.compile(rb"<page[\s>]")
_NAMESPACE = re.compile(r'<namespace key="(?:-2|6|14)"[^>]*>([^<]+)</namespace>')
_REDIRECT = re.compile(r"\s*#\s*\w+\s*:?\s*\[\[")


def chunks(file: Input) -> Iterator[Chunk]:
    """The dump in portions of complete pages."""
    stream = ByteStream(file.path)
    parse = partial(_pages, str(file.path), _namespaces(stream.head(_HEAD)))
    return chunks_of(stream, _END, "begins a page", parse, _whole(_utf8(stream)))


def _pages(path: str, dropped: frozenset[str], data: bytes, line: int) -> Records:
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
    for block in blocks:
        head, tail = (head + block)[:4096], (tail + block)[-4096:]
        yield block
    if head and b"<mediawiki" not in head:
        raise TruncatedError("does not begin with <mediawiki>, so it is not a dump")
    if b"</mediawiki>" not in tail:
        raise TruncatedError("ends before </mediawiki>, so it is truncated")


def _namespaces(head: bytes) -> frozenset[str]:
    """The names of the file and category namespaces in the dump that begins so."""
    names = _NAMESPACE.findall(head.decode("utf-16" if head.startswith(_UTF16) else "utf-8", "replace"))
    return DROPPED_NAMESPACES | {name.casefold() for name in names}


def _utf8(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """The dump as UTF-8: some Windows tools convert dumps to UTF-16 with a byte order mark."""
    remaining = iter(blocks)
    first = next(remaining, b"")
    if not first.startswith(_UTF16):
        yield from chain([first], remaining)
        return
    decoder = codecs.getincrementaldecoder("utf-16")()
    try:
        for block in chain([first], remaining):
            yield decoder.decode(block).encode("utf-8")
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise TruncatedError(f"is followed by bytes that are not UTF-16 ({error.reason})") from None
