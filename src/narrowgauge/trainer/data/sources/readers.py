"""Readers: how a file of each type is cut into chunks, and what documents a worker makes of a chunk.

**Text.** Each file is a document, or one file is cut into pieces that are documents. A single file is cut
because a tenth of every corpus is held out *by document*, and a novel in one file would otherwise be one
document. Concatenated, the pieces are the file again.

**Lines and rows**: texts under a key or in a column, in JSON lines, parquet files, and data sets of the
Hugging Face hub. They have no names, so such a document is its text alone: it is on the same side of the
split wherever it occurs, in whichever file.

`hf:NAME[:CONFIG[:SPLIT]]` is read by the hub's library `datasets`. It downloads a data set into its cache
(HF_HOME), resumes a download that was cut off, and reads the cache in offline mode (HF_HUB_OFFLINE=1). It
runs no code of a data set. If it fails for good, the error lists what was tried and how to manage without the
hub.

**Articles** of a MediaWiki dump (`pages-articles.xml.bz2`), or of WikiExtractor's files, as plain text. The
reader looks only for the ends of pages; the dump is decompressed while it is read, never to disk. A
worker parses each page separately with expat, so a broken page affects no other, and keeps articles: pages of
namespace 0 that are not redirects. The text of a document is the title, a blank line, and the plain text that
`wikitext` makes of the article. Schema: https://www.mediawiki.org/xml/export-0.11.xsd (older versions do not
differ in anything that is read here).

WikiExtractor has done that already: `<doc id= url= title=>`, the title, the text, `</doc>`.
"""

import codecs
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, groupby
from operator import attrgetter
from pathlib import Path
from typing import Any
from urllib.request import getproxies
from xml.etree import ElementTree

from narrowgauge.system.errors import UserError, unknown
from narrowgauge.trainer.data.sources import paths
from narrowgauge.trainer.data.sources.records import (
    CHUNK_BYTES,
    NAME_KEY,
    SET_ASIDE,
    ByteStream,
    Chunk,
    Input,
    Records,
    Rejected,
    Source,
    TruncatedError,
    chunks_of,
    document,
    not_utf8,
    package,
    refusal,
)
from narrowgauge.trainer.data.sources.wikitext import DROPPED_NAMESPACES, prose

MOST_UNCUT = 64 << 20  # bytes: a longer file is cut, even if it is one of many

PIECE_ENOUGH = 4096  # characters after which a blank line ends the piece,
_PIECE_LONG = 12288  # after which any line does,
_PIECE_MOST = 16384  # and the most of one line
_ESCAPED = re.compile("[\udc80-\udcff]")
_CONVERT = "convert it to UTF-8 or leave it out"

HUB = "hf:"
_ROWS = 256  # rows read at once: a row of a crawl has some thousand characters
_SETTINGS = ("HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")  # a mirror, offline mode

_PAGE, _END = re.compile(rb"<page[\s>]"), b"</page>"
_DOC, _DOC_END = re.compile(rb'\s*<doc [^>\n]*?title="([^"\n]*)"[^>\n]*>\n?'), b"</doc>"
_WIKI_HEAD = 1 << 16  # bytes, decompressed, that hold the names of the namespaces of files and categories
_NAMESPACE = re.compile(r'<namespace key="(?:-2|6|14)"[^>]*>([^<]+)</namespace>')
_REDIRECT = re.compile(r"\s*#\s*\w+\s*:?\s*\[\[")


def open_source(name: str, text_key: str = "text") -> Source:
    """Open a source of the table in `sources`; the text of a row or line is found under `text_key`."""
    if name.startswith(HUB):
        return _open_hub(name, text_key)
    try:
        files = paths.find_files(name, text_key) if name != paths.STDLIB else paths.standard_library()
    except OSError as error:
        raise UserError(
            f"cannot look into {str(error.filename or name)!r}: {error.strerror}; give a source that can be "
            "read"
        ) from None
    return Source(name, files, partial(_chunks, text_key))


def _chunks(key: str, files: Sequence[Input]) -> Iterator[Chunk]:
    """The chunks of files in order; a text alone is cut into pieces, and consecutive ones share chunks."""
    readers: dict[str, Callable[[Input], Iterator[Chunk]]] = {
        paths.LINES: partial(_line_chunks, key=key),
        paths.TABLE: partial(_parquet_chunks, key=key),
        paths.EXTRACT: _extract_chunks,
        paths.DUMP: _dump_chunks,
    }
    for type_, group in groupby(files, attrgetter("type")):
        if type_ in readers:
            yield from chain.from_iterable(map(readers[type_], group))
        else:
            yield from _text_pieces(files[0]) if len(files) == 1 else _text_files(group)


def no_text(source: str) -> UserError:
    """The error for a source without a document."""
    return UserError(f"data source {source!r} holds only white space; give one with text in it")


def _text_files(files: Iterable[Input]) -> Iterator[Chunk]:
    """Chunks of several files, each file a document; files too long for that are cut into pieces."""
    inputs, size = list[Input](), 0
    for file in files:
        file_size = file.path.stat().st_size
        is_long = file_size > MOST_UNCUT
        if not is_long:
            inputs.append(file)
            size += file_size
        if inputs and (is_long or size >= CHUNK_BYTES):
            yield Chunk(size, partial(_uncut, inputs))
            inputs, size = [], 0
        if is_long:
            yield from _text_pieces(file)
    if inputs:
        yield Chunk(size, partial(_uncut, inputs))


def _uncut(files: Sequence[Input]) -> Records:
    """A document for each file."""
    for file in files:
        where = str(file.path)
        try:
            text = b"".join(ByteStream(file.path)).decode("utf-8").removeprefix("\ufeff")
        except UnicodeDecodeError as error:
            yield not_utf8(where, error.start, error.object[error.start], _CONVERT)
        except TruncatedError as damage:
            yield Rejected(where, str(damage))
        else:
            before, nul, _ = text.partition("\x00")
            yield from document(f"{where}:{before.count(chr(10)) + 1}" if nul else where, file.name, text)


def _text_pieces(file: Input) -> Iterator[Chunk]:
    """A file, read in blocks and cut between paragraphs if possible, otherwise between lines.

    A byte that is not UTF-8 rejects its piece, but not the pieces after it.
    """
    stream, number, damage = ByteStream(file.path), 0, ""
    at = len(codecs.BOM_UTF8) * (stream.head(3) == codecs.BOM_UTF8)  # bytes before the texts
    texts, size = list[str](), 0
    try:
        # A byte that is not UTF-8 becomes U+DC00 + byte, unused in any text.
        for text in cut_text(codecs.iterdecode(stream, "utf-8-sig", "surrogateescape")):
            texts.append(text)
            size += len(text)
            if size >= CHUNK_BYTES:
                yield Chunk(stream.advance(), partial(_pieces, file, texts, number, at))
                number, at = number + len(texts), at + _bytes_of(texts)
                texts, size = [], 0
    except TruncatedError as error:
        damage = str(error)
    yield Chunk(stream.advance(), partial(_pieces, file, texts, number, at))
    if damage:
        yield refusal(str(file.path), damage)


def _pieces(file: Input, texts: Sequence[str], first: int, position: int) -> Records:
    """A document for each piece, numbered from `first`, which begins at byte `position`."""
    for number, text in enumerate(texts, first):
        if not text.isascii() and (bad := _ESCAPED.search(text)):
            before = position + _bytes_of([*texts[: number - first], text[: bad.start()]])
            yield not_utf8(str(file.path), before, ord(bad[0]) - 0xDC00, _CONVERT)
        else:
            yield from document(f"{file.path}, piece {number},", f"{file.name}#{number}", text)


def _bytes_of(texts: Iterable[str]) -> int:
    """The number of bytes that the texts were decoded from."""
    return sum(len(text.encode("utf-8", "surrogateescape")) for text in texts)


def cut_text(blocks: Iterable[str]) -> Iterator[str]:
    """The text of `blocks` in pieces of whole paragraphs, about 4 to 16 thousand characters."""
    size, piece = 0, list[str]()
    for line in _text_lines(blocks):
        for start in range(0, len(line), _PIECE_MOST):
            part = line[start : start + _PIECE_MOST]
            piece.append(part)
            size += len(part)
            if size >= _PIECE_LONG or (size >= PIECE_ENOUGH and part.isspace()):
                yield "".join(piece)
                size, piece = 0, []
    if piece:
        yield "".join(piece)


def _text_lines(blocks: Iterable[str]) -> Iterator[str]:
    """The lines with their endings; one that is longer than the limit of a piece comes in parts."""
    rest = ""
    for block in blocks:
        *lines, rest = (rest + block).splitlines(keepends=True) or [""]
        # The last line may continue in the next block, if only with the \n of a \r\n: yield full parts only.
        full = (len(rest) - 1) // _PIECE_MOST * _PIECE_MOST if rest else 0
        yield from [*lines, rest[:full]]
        rest = rest[full:]
    yield rest


def _line_chunks(file: Input, key: str) -> Iterator[Chunk]:
    """JSON lines, compressed or not, in portions of complete lines; C4, the Pile and most crawls use them."""
    if not file.path.stat().st_size:
        yield refusal(str(file.path), "is empty", "download it again, or leave it out")
        return
    yield from chunks_of(ByteStream(file.path), b"\n", "is a line", partial(_line, key))


def _line(key: str, path: Path, number: int, line: bytes, _: bool) -> Records:
    """The document of a line; none if it is white space."""
    where = f"{path}:{number}"
    if number == 1:
        line = line.removeprefix(codecs.BOM_UTF8)
    if not line or line.isspace():
        return
    if (nul := line.find(b"\x00")) >= 0:
        yield Rejected(where, f"holds a NUL byte (byte {nul} of the line)")
        return
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        yield not_utf8(where, f"{error.start} of the line", line[error.start])
    except json.JSONDecodeError as error:
        yield Rejected(where, f"is not JSON: {error.msg} at character {error.pos} of {len(line)} bytes")
    except (RecursionError, ValueError):  # nested too deeply, or an integer of thousands of digits
        yield Rejected(where, "is not JSON that can be read: nested too deeply, or a number too long")
    else:
        if not isinstance(value, dict):
            yield Rejected(where, f"holds a {type(value).__name__} where an object belongs")
        elif key not in value:
            keys = ", ".join(list(value)[:8]) or "nothing"
            yield Rejected(where, f"has no {key!r}; it has {keys}"[:300], f"{NAME_KEY}, {SET_ASIDE}")
        else:
            yield from document(where, "", value[key])


def _parquet_chunks(file: Input, key: str) -> Iterator[Chunk]:
    """The rows of the column `key`, a few hundred at a time."""
    arrow, parquet = (package(name, "a .parquet file") for name in ("pyarrow", "pyarrow.parquet"))
    row, size = 0, file.path.stat().st_size
    try:
        with parquet.ParquetFile(file.path, pre_buffer=False, buffer_size=1 << 20) as table:
            schema = table.schema_arrow
            _require_column(str(file.path), key, schema.names)
            is_dictionary = arrow.types.is_dictionary(held := schema.field(key).type)
            texts = held.value_type if is_dictionary else held
            if not re.match("(large_|fixed_size_)?(string|binary)", str(texts)):
                raise UserError(f"column {key!r} of {file.path} holds {held}, not text; {NAME_KEY}")
            row_bytes = size / max(table.metadata.num_rows, 1)
            for batch in table.iter_batches(_ROWS, columns=[key], use_threads=False):
                values = batch.column(0).dictionary_decode() if is_dictionary else batch.column(0)
                # Read as bytes, so that a text that is not UTF-8 is rejected on its own.
                values = values.cast(arrow.large_binary())
                part = partial(_rows, str(file.path), values.to_pylist(), row)
                yield Chunk(round(row_bytes * len(values)), part)
                row += len(values)
    except (OSError, arrow.ArrowException) as error:
        yield refusal(f"{file.path}, row {row},", f"cannot be read as parquet ({error})")


def _rows(path: str, values: Sequence[Any], first_row: int) -> Records:
    """A document for each value of a column."""
    for row, value in enumerate(values, first_row):
        where = f"{path}, row {row},"
        yield from [Rejected(where, "has no text")] if value is None else document(where, "", value)


def _require_column(where: str, key: str, columns: Sequence[str]) -> None:
    if key not in columns:
        raise UserError(f"{where}: {unknown('column', key, columns)}; {NAME_KEY}")


def _open_hub(source: str, key: str) -> Source:
    """The data set that `source` names, its text in the column `key`; a `UserError` if it names none."""
    name, _, rest = source.removeprefix(HUB).partition(":")
    config, _, split = rest.partition(":")
    if not name:
        raise UserError(
            f"{source!r} does not name a data set; write hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT"
        )

    def chunks(_: object) -> Iterator[Chunk]:
        table = _load(name, config or None, split or "train")
        _require_column(source, key, table.column_names)
        table = table.select_columns([key])
        for first in range(0, len(table), _ROWS):
            yield Chunk(0, partial(_rows, source, table[first : first + _ROWS][key], first))

    return Source(source, (), chunks, identity=source)


def _load(name: str, config: str | None, split: str) -> Any:
    datasets = package("datasets", f"data set {name!r}")
    try:
        return datasets.load_dataset(name, config, split=split)
    except Exception as error:  # each of the libraries below has its exception types
        root: BaseException = error  # the library's error names what failed, its root cause why
        while cause := root.__cause__ or root.__context__:
            root = cause
        reasons = dict.fromkeys(f"{type(e).__name__}: {e}" for e in (error, root))
        reason = " ".join(" from ".join(reasons).split())[:400]
        settings = {"HTTPS_PROXY": getproxies().get("https")} | {
            name: os.environ.get(name) for name in _SETTINGS
        }
        tried = ", ".join(f"{key}={_without_password(value or '')}" for key, value in settings.items())
        raise UserError(
            f"data set {name!r} cannot be read ({reason}) with {tried}; fix these, or fetch its .parquet or "
            ".jsonl files on a machine that reaches them, copy the folder here and prepare the folder"
        ) from error


def _without_password(address: str) -> str:
    scheme, mark, rest = address.rpartition("://")
    return scheme + mark + rest.rpartition("@")[2]  # a password may contain any character but the last @


def _extract_chunks(file: Input) -> Iterator[Chunk]:
    """A file of WikiExtractor's in portions of complete documents."""
    return chunks_of(ByteStream(file.path), _DOC_END, "begins a document", _doc)


def _doc(path: Path, line: int, doc: bytes, ends: bool) -> Records:
    """The document of a `<doc>`, named by its title."""
    where, begin = f"{path}:{line}", _DOC.match(doc)
    if not ends:
        yield from [Rejected(where, "begins a document without </doc>")] if doc.strip() else []
    elif begin is None:
        yield Rejected(where, "is not followed by <doc ... title=...>")
    else:
        try:
            yield from document(where, begin[1].decode("utf-8"), doc[begin.end() :].decode("utf-8"))
        except UnicodeDecodeError as error:
            yield Rejected(where, f"begins a document that is not UTF-8 ({error.reason})")


def _dump_chunks(file: Input) -> Iterator[Chunk]:
    """The dump in portions of complete pages."""
    stream = ByteStream(file.path)
    head, blocks = stream.head(_WIKI_HEAD), iter(stream)
    encoding = "utf-8"
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):  # converted by a tool of Windows
        encoding = "utf-16"
        blocks = (text.encode("utf-8") for text in codecs.iterdecode(stream, encoding))
    names = _NAMESPACE.findall(head.decode(encoding, "replace"))
    parse = partial(_page, DROPPED_NAMESPACES | {name.casefold() for name in names})
    return chunks_of(stream, _END, "begins a page", parse, _whole(blocks))


def _page(dropped: frozenset[str], path: Path, line: int, page: bytes, ends: bool) -> Records:
    """The document of an article; other pages, and what follows the last one, are skipped."""
    if not ends:
        return
    begin = _PAGE.search(page)
    if begin is None:
        yield Rejected(f"{path}:{line}", "is not the beginning of a page")
        return
    line += page.count(b"\n", 0, begin.start())
    where = f"{path}:{line}"
    try:
        tree = ElementTree.fromstring(page[begin.start() :] + _END)
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
