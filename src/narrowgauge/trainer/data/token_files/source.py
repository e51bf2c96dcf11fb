"""Token files of other programs as training data.

A source is a token file, a directory or a glob; Megatron's two files may also be named by their common name
without a suffix. In a directory, files that end in .bin, .npy or .ds are examined, but not those in
sub-folders; their content decides (`detect.py`); a warning names these, and documents beside them. All files
of a source have one layout. They are read in the order of their names, one after the other.

**Held out** is, by the first rule that matches:

1. in a directory or a glob: the files with `val`, `valid`, `validation` or `eval` as a word of their name
   (`fineweb_val_000000.bin`); those with `test` are not used;
2. for a file or a glob with the word `train` in its name: the files of the same name with `val` instead; a
   file with the word `val` names the same pair, if the other file exists;
3. the last tenth of the tokens, at most 10 million, starting at the next document if one begins nearby.

**The tokenizer** is the named one, or that of the files' folder; datatrove's files name theirs, and another
is refused. Otherwise ids are their own text (`ids-N`), with the vocabulary that the layout states; or
GPT-2's, if the largest id is its end of text, 50256. Anything else is refused, because a wrong guess would go
unnoticed.

All files are read once, for their digest and their largest id. The result is cached, because that takes
seconds for gigabytes. An entry is valid while path, inode, size and both modification times are unchanged
(rsync, tar and cp -p preserve only one of them). If the cache cannot be written, only time is lost.
"""

import contextlib
import glob
import hashlib
import json
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from narrowgauge.system.errors import UserError
from narrowgauge.system.files import cache_entry, sha256_of, user_path, write_cached
from narrowgauge.trainer.data.cache import Progress
from narrowgauge.trainer.data.sources.paths import LINES, TABLE, file_type, visible_files, warn_of_the_rest
from narrowgauge.trainer.data.token_files import datatrove
from narrowgauge.trainer.data.token_files.detect import open_tokens
from narrowgauge.trainer.data.token_files.token_file import OpenFile, check_ids, unfit
from narrowgauge.trainer.data.token_files.token_stream import Dataset, TokenStream, as_mixture
from narrowgauge.trainer.data.tokenization.formats import tokenizer_files
from narrowgauge.trainer.data.tokenization.tokenizer import (
    Tokenizer,
    ids_tokenizer,
    load_tokenizer,
    make_tokenizer,
)

_ENDINGS = (".bin", ".npy", datatrove.SUFFIX)
_HELD_OUT_WORDS = {"val", "valid", "validation", "eval"}
_HELD_OUT_ONE_IN = 10
_HELD_OUT_MOST = 10_000_000
_NEAR = 1 << 20  # tokens in which to look for the start of a document
_CHUNK = 1 << 22  # tokens read together
_GPT2_SIZE = 50257

Files = list[OpenFile]


def token_files(source: str) -> tuple[Files, Files] | None:
    """The files of a source to train on and those held out (none: the tail); None if it holds no tokens."""
    path = user_path(source)
    try:
        if path.is_dir():
            candidates = sorted(p for p in path.iterdir() if p.suffix in _ENDINGS and p.name[0] != ".")
            files = [
                file
                for p in candidates
                if p.is_file() and not datatrove.is_idle(p) and (file := open_tokens(p))
            ]
            if not files:
                return None
            others = [file.path for file in visible_files(path) if file.path.suffix != ".json"]
            found = [p for p in others if p.suffix in _ENDINGS or file_type(p) in (LINES, TABLE)]
            warn_of_the_rest(source, found, candidates)
            return _by_name(source, files)
        if not path.exists() and glob.has_magic(source):
            files = _matches(source)
            if not files:
                return None
            train, val = _by_name(source, files)
            known = {file.path for file in train}
            pairs = _matches(_with_word(source, "train", "val"))
            return train, val or [file for file in pairs if file.path not in known]
        path = _data_of(path)
        if not path.is_file() or not (file := open_tokens(path)):
            return None
        pair = [Path(_with_word(str(path), *words)) for words in (("val", "train"), ("train", "val"))]
        if pair[0] != pair[1] and all(map(Path.is_file, pair)):
            first, second = map(open_tokens, pair)
            if first and second:
                return [first], [second]
        return [file], []
    except OSError as error:
        raise UserError(
            f"cannot look into {source!r}: {error.strerror}; give a source that can be read"
        ) from None


def open_token_source(
    source: str, files: tuple[Files, Files], tokenizer: str | None, report: Progress
) -> Dataset:
    """Open the token files of a source, the result of `token_files`.

    Without the name of a tokenizer, the one that comes with the files is used. `report` is called as bytes
    are read.
    """
    opened = [*files[0], *files[1]]
    if other := next((file for file in opened if file.layout != opened[0].layout), None):
        raise UserError(
            f"data source {source!r} mixes layouts: {opened[0].path} is {opened[0].layout} and {other.path} "
            f"is {other.layout}; make two sources of it, separated by a comma"
        )
    statistics = [_statistics(file, report) for file in opened]
    largest = max(one.largest for one in statistics)
    chosen, boundaries = _tokenizer(source, opened[0], tokenizer, largest)
    for file, one in zip(opened, statistics, strict=True):
        if one.smallest < 0 or one.largest >= chosen.vocab_size:
            check_ids(file.path, file.tokens, chosen.vocab_size, unfit)
    facts = ["tokens", chosen.digest, *(one.sha256 for one in statistics), f"{len(files[1])} held out"]
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()
    streams = [_stream(part, boundaries) for part in files if part]
    train, val = streams if len(streams) == 2 else _split_tail(streams[0])
    return Dataset(chosen, as_mixture(train), as_mixture(val), digest)


def vocabulary_of_files(first: OpenFile) -> int | None:
    """The vocabulary size that comes with the first token file of a source; None if its ids decide it."""
    if tokenizer_files(first.path.parent):
        return load_tokenizer(first.path.parent).vocab_size
    if first.tokenizer is not None:
        return datatrove.checked_tokenizer(first, None).vocab_size
    return first.vocabulary[0] if first.vocabulary else None


def _data_of(path: Path) -> Path:
    """The file with the ids where one beside it is named, or Megatron's common name; else the path itself."""
    if path.suffix in datatrove.BESIDE and path.with_suffix("").is_file():
        return path.with_suffix("")
    for index in (path, path.with_name(path.name + ".idx")):
        if index.suffix == ".idx" and index.is_file():
            data = index.with_suffix(".bin")
            if not data.is_file():
                raise unfit(index, f"there is no {data.name} next to it")
            return data
    return path


def _matches(pattern: str) -> Files:
    """The token files that a glob matches, in order; apart from text files, either all match or none."""
    names = sorted(glob.glob(str(user_path(pattern)), recursive=True))
    paths = [Path(n) for n in names if Path(n).is_file() and file_type(Path(n)) is None]
    paths = [path for path in dict.fromkeys(map(_data_of, paths)) if not datatrove.is_idle(path)]
    opened = [open_tokens(path) for path in paths]
    files = [file for file in opened if file]
    if files and None in opened:
        raise UserError(
            f"data source {pattern!r} leads to token files and to {paths[opened.index(None)]}, which does "
            "not hold tokens; narrow the glob"
        )
    return files


def _by_name(source: str, files: Files) -> tuple[Files, Files]:
    words = {file: set(re.split(r"[^a-z]+", file.path.stem.lower())) for file in files}
    val = [file for file in files if words[file] & _HELD_OUT_WORDS]
    train = [file for file in files if file not in val and "test" not in words[file]]
    if not train:
        raise UserError(
            f"data source {source!r} holds nothing to train on: by their names its files are held out; "
            "name one of them to train on it"
        )
    return train, val


def _with_word(source: str, word: str, other: str) -> str:
    """The source with a word of its last part replaced by another."""
    head, slash, name = source.rpartition("/")
    return head + slash + re.sub(rf"(?<![A-Za-z]){word}(?![A-Za-z])", other, name, count=1)


class _Statistics(NamedTuple):
    """The sha256 of the files that belong together, and the range of their ids."""

    sha256: str
    smallest: int
    largest: int


def _statistics(file: OpenFile, report: Progress) -> _Statistics:
    """Statistics of the file, from the cache if possible; `report` is called as bytes are read."""
    files = (file.path, *file.beside)
    stats = [(path.resolve(), path.stat()) for path in files]
    facts = [(str(p), s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for p, s in stats]
    entry = cache_entry("surveys", *facts)
    with contextlib.suppress(OSError, ValueError, TypeError):
        known = _Statistics(*json.loads(entry.read_text(encoding="utf-8")))
        if [*map(type, known)] == [str, int, int]:
            return known
    smallest, largest, total = 0, 0, len(file.tokens)
    for start in range(0, total, _CHUNK):
        chunk = np.asarray(file.tokens[start : start + _CHUNK])
        smallest, largest = min(smallest, int(chunk.min())), max(largest, int(chunk.max()))
        size = chunk.itemsize
        report(f"scan {file.path.name}", (start + len(chunk)) * size, total * size, "")
    digests = "\n".join(sha256_of(path, follow_links=True) for path in files)
    result = _Statistics(hashlib.sha256(digests.encode()).hexdigest(), smallest, largest)
    write_cached(entry, result)
    return result


def _tokenizer(
    source: str, file: OpenFile, name: str | None, largest: int
) -> tuple[Tokenizer, tuple[int, ...]]:
    """The tokenizer, and the ids between documents."""
    tokenizer, stated = None, file.vocabulary
    if name is not None:
        if name.startswith("bpe-"):
            raise UserError(
                f"data source {source!r} holds tokens, but tokenizer {name!r} would be trained on text; "
                "name the tokenizer that they were made with, or leave data.tokenizer out"
            )
        tokenizer = make_tokenizer(name, [])
    elif tokenizer_files(file.path.parent):
        tokenizer = load_tokenizer(file.path.parent)
    elif stated or (largest == _GPT2_SIZE - 1 and file.tokenizer is None):
        tokenizer = ids_tokenizer(*(stated or (_GPT2_SIZE, largest)))
    if file.tokenizer is not None and not (name or "").startswith("ids-"):
        tokenizer = datatrove.checked_tokenizer(file, tokenizer)
    if tokenizer is None:
        raise UserError(
            f"{file.path} ({file.layout}) does not state which tokenizer made it, and its largest id is "
            f"{largest}; name one with --data.tokenizer FILE, or use the ids as they are with "
            f"--data.tokenizer ids-{largest + 2}"
        )
    # Llama 3 ends a document with one id, and llm.c separates documents with another.
    of_layout = {stated[1]} if stated and stated[0] == tokenizer.vocab_size else set()
    return tokenizer, tuple(sorted({tokenizer.end_of_document} | of_layout))


def _stream(files: Files, boundaries: tuple[int, ...]) -> TokenStream:
    """The stream of the files, one after the other."""
    starts, offset = [], 0
    for file in files:
        if file.starts is not None:
            starts.append(file.starts + offset)
        offset += len(file.tokens)
    first = files[0].boundary_first
    return TokenStream(
        tuple(file.tokens for file in files),
        boundaries,
        int(files[0].tokens[0]) in boundaries if first is None else first,
        starts=np.concatenate(starts) if starts else None,
    )


def _split_tail(stream: TokenStream) -> tuple[TokenStream, TokenStream]:
    """The stream without its tail, and the tail, which is held out."""
    size = len(stream)
    cut = size - min(size // _HELD_OUT_ONE_IN, _HELD_OUT_MOST)
    cut = stream.next_start(cut, min(_NEAR, (size - cut) // 2))
    return stream.substream(0, cut), stream.substream(cut, size)
