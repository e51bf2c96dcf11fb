"""The dataset of a run, opened from its configuration.

A source is the first of these that applies:

- a prepared corpus (`corpus`), written by `narrowgauge prepare`;
- token files of another program (`token_files.source`), read in the order of their names;
- text, which is prepared on the spot (`preparation.prepare`).

Several sources are separated by commas. `weights` gives each source's share of the samples; without weights,
shares are proportional to token counts. All sources use one tokenizer: the named one, or with `auto` that of
the first source. For text, `auto` trains bpe-4096 on the first source alone.

**The tokenizer of token files** is the named one, or that of their folder; datatrove's files name theirs, and
another is refused. Otherwise ids are their own text (`ids-N`), with the vocabulary that the layout states; or
GPT-2's, if the largest id is its end of text, 50256. Anything else is refused, because a wrong guess would go
unnoticed.

Without a held-out file, the last tenth of the tokens is held out, at most 10 million, starting at the next
document if one begins nearby.

Token files are read once, for their digest and their largest id. The result is cached, because that takes
seconds for gigabytes. An entry is valid while path, inode, size and both modification times are unchanged
(rsync, tar and cp -p preserve only one of them). If the cache cannot be written, only time is lost.
"""

import contextlib
import hashlib
import json
import warnings
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np

from narrowgauge.system.errors import UserError
from narrowgauge.system.files import cache_entry, sha256_of, user_path, write_cached
from narrowgauge.trainer.data.corpus import Corpus, is_corpus, read_manifest
from narrowgauge.trainer.data.loading.sample_order import shares_of
from narrowgauge.trainer.data.preparation.prepare import Progress, no_progress, prepare
from narrowgauge.trainer.data.sources.readers import HUB, open_source
from narrowgauge.trainer.data.token_files.source import Files, token_files
from narrowgauge.trainer.data.token_files.tokens import (
    Dataset,
    Mixture,
    OpenFile,
    TokenStream,
    check_ids,
    unfit,
)
from narrowgauge.trainer.data.tokenization.formats import TOKENIZER_FILE, tokenizer_files
from narrowgauge.trainer.data.tokenization.tokenizer import (
    Tokenizer,
    ids_tokenizer,
    load_tokenizer,
    make_tokenizer,
)

AUTO = "auto"
_HELD_OUT_ONE_IN = 10
_HELD_OUT_MOST = 10_000_000
_NEAR = 1 << 20  # tokens in which to look for the start of a document
_CHUNK = 1 << 22  # tokens read together
_GPT2_SIZE = 50257


def open_data(
    source: str,
    tokenizer: str = AUTO,
    weights: Sequence[float] = (),
    progress: Progress | None = None,
) -> Dataset:
    """Open the dataset of a run; text is prepared first.

    Args:
        source: One source, or several separated by commas.
        tokenizer: Name of the tokenizer, or `AUTO`.
        weights: One weight for each source; () = proportional to token counts.
        progress: Called with progress reports while text is prepared or files are read.

    Raises:
        UserError: a source, the tokenizer or the weights cannot be used.
    """
    report = progress or no_progress
    names, opened = split_sources(source, weights), list[Dataset]()
    for name in names:
        opened.append(_open(name, tokenizer, opened[0] if opened else None, report))
        first, last = opened[0], opened[-1]
        if last.tokenizer.digest != first.tokenizer.digest:
            raise UserError(
                f"data sources {names[0]!r} and {name!r} have different tokenizers (sha256 "
                f"{first.tokenizer.digest[:12]} and {last.tokenizer.digest[:12]}); make both with the same "
                "one, and name it with --data.tokenizer"
            )
    if len(opened) == 1:
        return opened[0]
    shares = shares_of(weights or [len(one.train) for one in opened])
    digest = hashlib.sha256("\n".join(one.digest for one in opened).encode()).hexdigest()
    train, val = (
        Mixture(tuple(stream for one in parts for stream in one.streams), shares)
        for parts in zip(*((one.train, one.val) for one in opened), strict=True)
    )
    return Dataset(opened[0].tokenizer, train, val, digest)


def vocabulary_before_reading(source: str, tokenizer: str, weights: Sequence[float] = ()) -> int | None:
    """The vocabulary size of a dataset of `open_data`, from its tokenizer and file headers alone.

    None if it depends on the text or on all tokens.
    """
    if tokenizer != AUTO:
        return None if tokenizer.startswith("bpe-") else make_tokenizer(tokenizer, ()).vocab_size
    first = split_sources(source, weights)[0]
    if is_corpus(user_path(first)):
        return read_manifest(user_path(first)).vocab_size
    if not (files := token_files(first)):
        return None
    stated = _stated_tokenizer(files[0][0], None)
    return None if stated is None else stated.vocab_size


def why_absent(source: str, weights: Sequence[float] = ()) -> str:
    """Why this machine cannot open a dataset's sources, from their names alone; empty if it can.

    The hub is not asked.
    """
    try:
        for name in split_sources(source, weights):
            if not (name.startswith(HUB) or is_corpus(user_path(name)) or token_files(name)):
                open_source(name)
    except UserError as error:
        return str(error)
    return ""


def split_sources(source: str, weights: Sequence[float] = ()) -> list[str]:
    """Split a list of sources at its commas; an existing path that contains a comma is one source."""
    names = [source] if user_path(source).exists() else [name.strip() for name in source.split(",")]
    if not all(names):
        raise UserError(f"data source {source!r} has an empty name between commas; remove the comma")
    if weights and len(weights) != len(names):
        raise UserError(
            f"data.weights has {len(weights)} numbers, and data.source {source!r} names {len(names)}; give "
            "one weight for each source"
        )
    if any(not 0 < weight < float("inf") for weight in weights):
        raise UserError(f"data.weights = {list(weights)} must be positive; leave out a source of no weight")
    return names


def _open(name: str, tokenizer: str, first: Dataset | None, report: Progress) -> Dataset:
    named = None if tokenizer == AUTO else tokenizer
    if not is_corpus(user_path(name)):
        if files := token_files(name):
            return _of_token_files(name, files, named, report)
        if isinstance(first, Corpus) and (named is None or named.startswith("bpe-")):
            named = str(first.directory / TOKENIZER_FILE)
    return prepare(name, named, progress=report)


def _of_token_files(
    source: str, files: tuple[Files, Files], tokenizer: str | None, report: Progress
) -> Dataset:
    opened = [*files[0], *files[1]]
    if other := next((file for file in opened if file.layout != opened[0].layout), None):
        raise UserError(
            f"data source {source!r} mixes layouts: {opened[0].path} is {opened[0].layout} and {other.path} "
            f"is {other.layout}; make two sources of it, separated by a comma"
        )
    digests, smallest, largest = zip(*(_statistics(file, report) for file in opened), strict=True)
    chosen, boundaries = _tokenizer(source, opened[0], tokenizer, max(largest))
    for file, low, high in zip(opened, smallest, largest, strict=True):
        if low < 0 or high >= chosen.vocab_size:
            check_ids(file.path, file.tokens, chosen.vocab_size, unfit)
    facts = ["tokens", chosen.digest, *digests, f"{len(files[1])} held out"]
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()
    streams = [_stream(part, boundaries) for part in files if part]
    train, val = streams if len(streams) == 2 else _split_tail(streams[0])
    return Dataset(chosen, Mixture((train,)), Mixture((val,)), digest)


def _statistics(file: OpenFile, report: Progress) -> tuple[str, int, int]:
    """The sha256 of the files that belong together, and their smallest and largest id.

    They come from the cache if possible; otherwise `report` is called as bytes are read.
    """
    files = (file.path, *file.beside)
    stats = [(path.resolve(), path.stat()) for path in files]
    facts = [(str(p), s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for p, s in stats]
    entry = cache_entry("surveys", *facts)
    with contextlib.suppress(OSError, ValueError, TypeError):
        sha256, smallest, largest = json.loads(entry.read_text(encoding="utf-8"))
        if [*map(type, (sha256, smallest, largest))] == [str, int, int]:
            return sha256, smallest, largest
    smallest, largest, total = 0, 0, len(file.tokens)
    for start in range(0, total, _CHUNK):
        chunk = np.asarray(file.tokens[start : start + _CHUNK])
        smallest, largest = min(smallest, int(chunk.min())), max(largest, int(chunk.max()))
        size = chunk.itemsize
        report(f"scan {file.path.name}", (start + len(chunk)) * size, total * size, "")
    digests = "\n".join(sha256_of(path, follow_links=True) for path in files)
    result = hashlib.sha256(digests.encode()).hexdigest(), smallest, largest
    write_cached(entry, result)
    return result


def _tokenizer(
    source: str, file: OpenFile, name: str | None, largest: int
) -> tuple[Tokenizer, tuple[int, ...]]:
    """The tokenizer, and the ids between documents."""
    if name is not None and name.startswith("bpe-"):
        raise UserError(
            f"data source {source!r} holds tokens, but tokenizer {name!r} would be trained on text; "
            "name the tokenizer that they were made with, or leave data.tokenizer out"
        )
    tokenizer, stated = _stated_tokenizer(file, name), file.vocabulary
    if tokenizer is None and largest == _GPT2_SIZE - 1:
        tokenizer = ids_tokenizer(_GPT2_SIZE, largest)
    if tokenizer is None:
        raise UserError(
            f"{file.path} ({file.layout}) does not state which tokenizer made it, and its largest id is "
            f"{largest}; name one with --data.tokenizer FILE, or use the ids as they are with "
            f"--data.tokenizer ids-{largest + 2}"
        )
    # Llama 3 ends a document with one id, and llm.c separates documents with another.
    of_layout = {stated[1]} if stated and stated[0] == tokenizer.vocab_size else set()
    return tokenizer, tuple(sorted({tokenizer.end_of_document} | of_layout))


def _stated_tokenizer(file: OpenFile, name: str | None) -> Tokenizer | None:
    """The tokenizer that is named, lies beside a file, or is stated by it or its layout; None without one."""
    if name is not None:
        tokenizer: Tokenizer | None = make_tokenizer(name, [])
    elif tokenizer_files(file.path.parent):
        tokenizer = load_tokenizer(file.path.parent)
    else:
        tokenizer = ids_tokenizer(*file.vocabulary) if file.vocabulary else None
    if file.tokenizer is None or (name or "").startswith("ids-"):
        return tokenizer
    return _checked_tokenizer(file, tokenizer)


def _checked_tokenizer(opened: OpenFile, chosen: Tokenizer | None) -> Tokenizer:
    """The tokenizer that a file's metadata names, read from that path or from the hub's cache.

    `chosen` is the tokenizer to use instead, if it is the same.
    """
    path, name, size = opened.path, opened.tokenizer or "", opened.tokens.dtype.itemsize
    file = _file_of_hub(name)
    made = load_tokenizer(file) if file else chosen
    if made is None:
        raise UserError(
            f"{path} was made with tokenizer {name!r}, which is not on this machine; name its tokenizer.json "
            "with --data.tokenizer FILE"
        )
    if file is None:
        warnings.warn(
            f"{path}: tokenizer {name!r} is not here, so the chosen one is not compared", stacklevel=2
        )
    right_size = 4 if made.library.get_vocab_size() > 1 << 16 else 2
    if (chosen and made.digest != chosen.digest) or size != right_size:
        raise UserError(
            f"{path} was made with tokenizer {name!r} and ids of {size} bytes, and not with the chosen one "
            f"of {(chosen or made).vocab_size} entries; leave data.tokenizer out"
        )
    return made


def _file_of_hub(name: str) -> Path | None:
    if (path := user_path(name)).exists():
        return path
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, "tokenizer.json")
    except HFValidationError:  # a path of the machine that tokenized
        return None
    return Path(cached) if isinstance(cached, str) else None


def _stream(files: Files, boundaries: tuple[int, ...]) -> TokenStream:
    """The stream of the files, one after the other."""
    arrays = tuple(file.tokens for file in files)
    offsets = accumulate(map(len, arrays[:-1]), initial=0)
    starts = [f.starts + offset for f, offset in zip(files, offsets, strict=True) if f.starts is not None]
    if (first := files[0].boundary_first) is None:
        first = int(arrays[0][0]) in boundaries
    return TokenStream(arrays, boundaries, first, np.concatenate(starts) if starts else None)


def _split_tail(stream: TokenStream) -> tuple[TokenStream, TokenStream]:
    """The stream without its tail, and the tail, which is held out."""
    size = len(stream)
    cut = size - min(size // _HELD_OUT_ONE_IN, _HELD_OUT_MOST)
    cut = stream.next_start(cut, min(_NEAR, (size - cut) // 2))
    return stream.substream(0, cut), stream.substream(cut, size)
