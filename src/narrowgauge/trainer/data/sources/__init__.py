"""Sources of text.

A *source* is one word or one path. It is read as a sequence of documents, in an order that depends only on
the source itself: not on the file system, the locale, the date or the number of workers.

| source             | its documents                                                                   |
|--------------------|---------------------------------------------------------------------------------|
| `stdlib`           | each module of the running Python's standard library: ten megabytes that every  |
|                    | machine already has                                                             |
| .txt, .md, .py     | the file cut into pieces of whole paragraphs, about 4 to 16 thousand characters |
| .jsonl, .json      | each line: an object with the text under a key                                  |
| .parquet           | each row: the text in a column                                                  |
| .xml               | each article of a MediaWiki dump (`pages-articles`), converted to plain text    |
| no suffix          | such lines, or each `<doc>` of WikiExtractor (`AA/wiki_00`)                      |
| a directory        | each file below it of a type above, text files uncut; hidden files are skipped, |
|                    | links are followed, and no folder is read twice. Beside data, its README,       |
|                    | licence and scripts are no documents, nor is .json without such lines           |
| a glob             | each matching file of a type above; `**` matches folders                        |
| `hf:NAME`          | each row of a data set of the Hugging Face hub                                  |

All except .parquet may be compressed (.gz, .bz2, .xz, .zst). Text is UTF-8; a byte order mark at its start is
dropped, everything else is kept unchanged, including line endings. Documents of only white space are skipped.
A directory or a glob that leads to a single text file is read as that file.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, groupby
from operator import attrgetter

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.data.sources import paths, readers
from narrowgauge.trainer.data.sources.records import Chunk, Input, Source


def open_source(name: str, text_key: str = "text") -> Source:
    """Open a source of the table above; the text of a row or line is found under `text_key`."""
    if name.startswith(readers.HUB):
        return readers.open_hub(name, text_key)
    try:
        files = paths.find_files(name, text_key) if name != paths.STDLIB else paths.standard_library()
    except OSError as error:
        raise UserError(
            f"cannot look into {str(error.filename or name)!r}: {error.strerror}; give a source that can be "
            "read"
        ) from None
    return Source(name, files, partial(_chunks, text_key=text_key))


def _chunks(files: Sequence[Input], text_key: str) -> Iterator[Chunk]:
    """The chunks of files in order; a text alone is cut into pieces, and consecutive ones share chunks."""
    of_type: dict[str, Callable[[Input], Iterator[Chunk]]] = {
        paths.LINES: partial(readers.line_chunks, key=text_key),
        paths.TABLE: partial(readers.parquet_chunks, key=text_key),
        paths.EXTRACT: readers.extract_chunks,
        paths.DUMP: readers.dump_chunks,
    }
    if len(files) == 1:
        of_type[paths.TEXT] = readers.text_pieces
    for type_, group in groupby(files, attrgetter("type")):
        if type_ in of_type:
            yield from chain.from_iterable(map(of_type[type_], group))
        else:
            yield from readers.text_files(group)


def no_text(source: str) -> UserError:
    """The error for a source without a document."""
    return UserError(f"data source {source!r} holds only white space; give one with text in it")
