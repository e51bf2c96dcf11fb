"""Prepares a source as a corpus.

    files -> chunks -> documents -> kept or not, held out or not -> token ids -> train.bin, val.bin
    (reader)           (workers)    (this process, in their order)  (workers)    (this process)

The files are digested first. Their digests, the tokenizer and the options decide whether the corpus already
exists. With an existing tokenizer, the source is then read once. A tokenizer that has to be trained needs the
text before there are ids (`_training_texts`), so the source is read twice. Memory does not depend on the
length of the source, and the result does not depend on the number of workers.

**Atomic.** The corpus is built in a staging directory and renamed, so any corpus that exists is complete. If
two processes prepare the same corpus at once, both build it, one publishes it, and both use that one. The
same files, tokenizer and options give the same bytes: times, paths and the order of arrival do not matter.

**Held out** is a share of the documents, a tenth by default, chosen by the sha256 of name and text, so a
document stays on its side when others are added or removed. Let r be the first eight bytes of the digest as
an integer. Its last decimal digit selects a tenth, and the other digits a position within that tenth:

    u = (r mod 10 + (r div 10) / B) / 10,    B = ceil(2^64 / 10),    held out where u < share

A larger share holds out everything that a smaller one does, and more. If all documents are on one side, the
one with the lowest (or the highest) r moves to the other; that is known when all have been read, so the
source is then read again.

**Duplicates** are documents whose text equals that of an earlier one, byte for byte. To remove them, the
digests of all texts are stored on disk, sixteen bytes for each document, so that memory does not grow.
"""

import hashlib
import heapq
import json
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path
from typing import Any

from narrowgauge.system.errors import UserError
from narrowgauge.system.files import cache_directory, sha256_of, staged_directory, user_path, write_whole
from narrowgauge.trainer.data.corpus import (
    LAYOUT_VERSION,
    MANIFEST_FILE,
    Corpus,
    CorpusManifest,
    is_corpus,
    open_corpus,
)
from narrowgauge.trainer.data.preparation.workers import (
    ReadChunk,
    ReadDocument,
    ordered_map,
    read_chunk,
    usable_cores,
)
from narrowgauge.trainer.data.sources.readers import PIECE_ENOUGH, no_text, open_source
from narrowgauge.trainer.data.sources.records import Chunk, Input, Rejected, unreadable
from narrowgauge.trainer.data.token_files.tokens import TokenFile, TokenWriter, shard_paths, token_dtype
from narrowgauge.trainer.data.tokenization.formats import TOKENIZER_FILE
from narrowgauge.trainer.data.tokenization.tokenizer import (
    Tokenizer,
    load_tokenizer,
    make_tokenizer,
    parallel_tokenizing,
    tokenizer_identity,
)

# (stage, bytes done, total bytes or 0 if unknown, further facts as text)
Progress = Callable[[str, int, int, str], None]

DEFAULT_TOKENIZER = "bpe-4096"
REJECTED_FILE = "rejected.jsonl"
TRAIN, VAL = "train", "val"
MOST_TOKENS = 1 << 30  # in one token file
TRAINING_CHARACTERS = 8 << 20  # more text changes the merges little, but costs time and memory
_ENOUGH_RECORDS = 1000  # from here on, the share of rejected records is checked while reading
_CACHE_KIB = 1 << 16  # memory for the digests of texts
_B = -(-(2**64) // 10)
_FEW_BYTES = 8 << 20  # below this, starting processes takes longer than they save


@dataclass(frozen=True)
class Options:
    """Options for the selection of documents."""

    val_fraction: float = 0.1  # share of the documents to hold out
    dedup: bool = False  # whether duplicates are removed
    tolerance: float | None = None  # share of the records that may be rejected; None = none at all
    text_key: str = "text"  # column or key of the text in a row or line

    def __post_init__(self) -> None:
        for name, share in (("held-out", self.val_fraction), ("tolerated", self.tolerance)):
            if share is not None and not 0 < share < 1:
                raise UserError(f"the {name} share {share} must be between 0 and 1, such as 0.1 or 0.01")


def prepare(
    source: str,
    tokenizer: str | None = None,
    directory: Path | None = None,
    progress: Progress | None = None,
    *,
    options: Options | None = None,
    workers: int | None = 1,
) -> Corpus:
    """Make a corpus, or open it if it exists.

    Args:
        source: See `data.sources`. A prepared corpus is opened as it is; options other than its own are
            refused.
        tokenizer: Name of the tokenizer; None = `DEFAULT_TOKENIZER`.
        directory: Directory of the corpus; None = one in the cache.
        progress: Called as bytes are read, trained on and encoded.
        options: Selection of the documents; None = the defaults.
        workers: Number of processes, including this one; None = one for each core if there is enough to read.

    Raises:
        UserError: the source, tokenizer or directory cannot be used, a record is rejected, or the corpus is
            damaged.
    """
    path = user_path(source)
    if is_corpus(path):
        if directory:
            raise UserError(f"{source!r} is already prepared; train on it directly, with --data {source}")
        return _open_prepared(path, tokenizer, options or Options())
    if workers is not None and workers < 1:
        raise UserError(f"--workers {workers} must be at least 1")
    name = tokenizer or DEFAULT_TOKENIZER
    build = _Build(source, name, options or Options(), progress or no_progress)
    name = f"{_slug(source)}-{_slug(name)}-{build.request[:12]}"
    target = directory or cache_directory() / "tokens" / name
    _require_usable(target)
    if not (target / MANIFEST_FILE).exists():
        few = 0 < build.total < _FEW_BYTES
        workers = workers or (1 if few else usable_cores())
        try:
            with staged_directory(target, keep_existing=True) as staging, parallel_tokenizing():
                build.fill(staging, workers)
        except OSError as error:
            raise UserError(
                f"cannot write the corpus to {target}: {error.strerror or error}; name a directory with room "
                "in --out or NARROWGAUGE_CACHE"
            ) from error
    corpus = open_corpus(target)
    if corpus.manifest.request != build.request:
        raise UserError(
            f"{target} holds another corpus ({corpus.manifest.source} with {corpus.manifest.tokenizer}, "
            f"request {corpus.manifest.request[:12]}, not {build.request[:12]}); delete it or name another "
            "directory"
        )
    return corpus


def no_progress(*facts: object) -> None:
    """Ignore a report."""


def _open_prepared(directory: Path, tokenizer: str | None, options: Options) -> Corpus:
    """Open the corpus in a directory; a tokenizer or options other than its own are an error."""
    corpus = open_corpus(directory)
    manifest = corpus.manifest
    for name, value in asdict(options).items():
        if value not in (asdict(Options())[name], manifest.options.get(name)):
            raise UserError(
                f"{directory} was prepared with {name} = {manifest.options.get(name)}, not {value}; leave "
                "the option out, or prepare the text again"
            )
    known = (manifest.tokenizer_identity, f"sha256:{manifest.tokenizer_sha256}")
    if tokenizer is None or tokenizer_identity(tokenizer) in known:
        return corpus
    # The same ids may be stored in another file format.
    path = user_path(tokenizer)
    if not path.exists() or load_tokenizer(path).digest != corpus.tokenizer.digest:
        raise UserError(
            f"{directory} was prepared with tokenizer {manifest.tokenizer!r}, and data.tokenizer asks for "
            f"{tokenizer!r}; leave data.tokenizer out, or prepare the text again"
        )
    return corpus


def _require_usable(target: Path) -> None:
    """Refuse a directory with other content before any work is done."""
    try:
        existing = next(path for path in (target, *target.parents) if path.exists())
        if not existing.is_dir():
            reason = "is a file"
        elif existing == target and any(target.iterdir()) and not (target / MANIFEST_FILE).exists():
            reason = f"is not empty and has no {MANIFEST_FILE}, so it is not a prepared corpus"
        else:
            return
    except OSError as error:
        raise UserError(f"cannot look into {target}: {error.strerror}; name another directory") from None
    raise UserError(
        f"cannot write the corpus to {target}: {existing} {reason}; delete it or name another directory"
    )


def _slug(name: str) -> str:
    """A word for the name of a folder: the last part of a path, with unusual characters replaced."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(name).name).strip("-.")[:40] or "text"


class _ReadAgain(Exception):
    """One side is without a document; the source has to be read again, otherwise."""


class _Build:
    """The build of one corpus; `request` identifies all that it depends on."""

    def __init__(self, source: str, tokenizer: str, options: Options, report: Progress) -> None:
        self.name, self.options, self.report = tokenizer, options, report
        self.identity = tokenizer_identity(tokenizer)  # refuses a misspelt one before anything is read
        self.source = open_source(source, options.text_key)
        self.stats = [file.path.stat() for file in self.source.inputs]
        self.total = sum(stat.st_size for stat in self.stats)
        self.files = list[dict[str, Any]]()
        self.inputs = list[Input]()  # the files to read: equal ones under one name
        self.cut = False  # whether documents are cut into pieces
        self.moved: int | None = None  # the number of the document that changes sides
        first, digested = dict[str, str](), 0

        def advance(size: int) -> None:
            nonlocal digested
            digested += size
            report("digest", digested, self.total, "")

        for file, stat in zip(self.source.inputs, self.stats, strict=True):
            try:
                sha256 = sha256_of(file.path, follow_links=True, advance=advance)
            except OSError as error:
                raise unreadable(file.path, error) from None
            self.files.append({"name": file.name, "bytes": stat.st_size, "sha256": sha256})
            # The name decides the side of a text; equal files share one, so that neither shows the other.
            self.inputs.append(replace(file, name=first.setdefault(sha256, file.name)))
        facts = [LAYOUT_VERSION, self.identity, asdict(options), self.source.identity, self.files]
        self.request = hashlib.sha256(json.dumps(facts, sort_keys=True).encode("utf-8")).hexdigest()

    def fill(self, staging: Path, workers: int) -> None:
        """Fill a directory; once all is read it may turn out that it must be read again, otherwise."""
        self.staging, self.workers = staging, workers
        while True:
            for path in staging.iterdir():
                path.unlink()
            with suppress(_ReadAgain):
                return self._fill()

    def _fill(self) -> None:
        texts = list[str]()
        if self.identity == self.name and self.name.startswith("bpe-"):
            read = self._documents("read", partial(read_chunk, self.cut, None))
            texts = _training_texts(document for side, document in read if side == TRAIN)
        path = self.staging / TOKENIZER_FILE
        tokenizer = make_tokenizer(self.name, self._reported(texts))
        tokenizer.save(path)
        encode = partial(read_chunk, self.cut, (path, tokenizer.digest))
        size = tokenizer.vocab_size
        with (
            TokenWriter(shard_paths(self.staging, TRAIN), size, MOST_TOKENS) as train,
            TokenWriter(shard_paths(self.staging, VAL), size, MOST_TOKENS) as val,
        ):
            for side, document in self._documents("encode", encode):
                (train if side == TRAIN else val).write(document.body)
        files = self._renamed(TRAIN, train.written), self._renamed(VAL, val.written)
        write_whole(self.staging / MANIFEST_FILE, self._manifest(tokenizer, *files).to_json())

    def _documents(
        self, stage: str, work: Callable[[Chunk], ReadChunk]
    ) -> Iterator[tuple[str, ReadDocument]]:
        """The side of each document that is kept and what `work` makes of it, in the order of the source.

        After the last one, both sides must have a document. So a single document is cut into pieces, and of
        several on one side, one moves to the other: `_ReadAgain`.
        """
        done = 0
        self.documents = {TRAIN: 0, VAL: 0}
        self.kept = self.duplicates = self.rejected = 0
        self.digest, self.first_rejected = hashlib.sha256(), ""
        (self.staging / REJECTED_FILE).unlink(missing_ok=True)  # of an earlier reading
        extremes = list[tuple[int, int]]()  # rank and number of the document of the lowest and highest
        all_new = nullcontext(lambda content: True)
        with seen_texts(self.staging / "seen") if self.options.dedup else all_new as is_new:
            chunks = self.source.chunks(self.inputs)
            for size, documents, rejected in ordered_map(work, chunks, self.workers):
                self._reject(rejected)
                for document in documents:
                    if not is_new(document.content):
                        self.duplicates += 1
                        continue
                    self.digest.update(document.digest)
                    ranks = [*extremes, (_rank(document.digest), self.kept)]
                    extremes = [min(ranks, key=itemgetter(0)), max(ranks, key=itemgetter(0))]
                    held_out = is_held_out(document.digest, self.options.val_fraction)
                    side = VAL if held_out != (self.kept == self.moved) else TRAIN
                    self.documents[side] += 1
                    self.kept += 1
                    yield side, document
                done += size
                self.report(stage, done, self.total, f"{self.kept:,} documents")
        self._check_tolerance()
        self._check_unchanged()
        if not self.kept:
            raise no_text(self.source.name)
        if self.kept == 1 and self.cut:
            raise UserError(
                f"data source {self.source.name!r} is a single document, not long enough for pieces of "
                f"{PIECE_ENOUGH:,} characters, and a corpus needs two, one of them held out; add text"
            )
        if self.kept == 1:
            self.cut = True
            raise _ReadAgain
        if not all(self.documents.values()):
            (_, lowest), (_, highest) = extremes
            self.moved = highest if self.documents[VAL] else lowest
            raise _ReadAgain

    def _check_unchanged(self) -> None:
        """Raise an error if a file has changed since it was digested."""
        for file, before in zip(self.source.inputs, self.stats, strict=True):
            now = file.path.stat() if file.path.exists() else None
            if now is None or (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
                raise UserError(
                    f"data source {self.source.name!r} changed while it was read, at {file.name}; prepare it "
                    "again"
                )

    def _reject(self, records: list[Rejected]) -> None:
        """Raise an error for the first record, or write all to rejected.jsonl, depending on the options."""
        if not records:
            return
        if self.options.tolerance is None:
            raise UserError(str(records[0]))
        self.first_rejected = self.first_rejected or str(records[0])
        self.rejected += len(records)
        with (self.staging / REJECTED_FILE).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({"where": r.where, "reason": r.reason}) + "\n" for r in records)
        self._check_tolerance(_ENOUGH_RECORDS)

    def _check_tolerance(self, enough: int = 0) -> None:
        """Raise an error if of `enough` records or more too many were rejected for the options."""
        total, allowed = self.kept + self.duplicates + self.rejected, self.options.tolerance or 0.0
        if total >= enough and self.rejected > allowed * total:
            raise UserError(
                f"{self.rejected} of {total} records of {self.source.name!r} were rejected "
                f"({self.rejected / total:.1%}), more than the {allowed:.1%} that --tolerant allows; the "
                f"first: {self.first_rejected}"
            )

    def _reported(self, texts: list[str]) -> Iterator[str]:
        for number, text in enumerate(texts, 1):
            self.report("learn", number, len(texts), "")
            yield text

    def _renamed(self, side: str, written: list[TokenFile]) -> list[TokenFile]:
        """The files of a side; the name of a single one loses its number."""
        if len(written) > 1:
            return written
        file = written[0].model_copy(update={"name": f"{side}.bin"})
        (self.staging / written[0].name).rename(self.staging / file.name)
        return [file]

    def _manifest(self, tokenizer: Tokenizer, train: list[TokenFile], val: list[TokenFile]) -> CorpusManifest:
        documents = self.digest.hexdigest()
        parts = ["layout 1", self.identity, documents]
        if self.options.val_fraction != Options.val_fraction:  # older corpora had no other
            parts.append(f"held out {self.options.val_fraction}")
        return CorpusManifest(
            layout=LAYOUT_VERSION,
            version=version("narrowgauge"),
            source=self.source.name,
            files=self.files,
            tokenizer=self.name,
            tokenizer_identity=self.identity,
            options=asdict(self.options),
            request=self.request,
            digest=hashlib.sha256("\n".join(parts).encode("utf-8")).hexdigest(),
            documents_sha256=documents,
            vocab_size=tokenizer.vocab_size,
            dtype=token_dtype(tokenizer.vocab_size).name,
            train_documents=self.documents[TRAIN],
            val_documents=self.documents[VAL],
            duplicates=self.duplicates,
            rejected=self.rejected,
            train_tokens=sum(file.tokens for file in train),
            val_tokens=sum(file.tokens for file in val),
            train=train,
            val=val,
            tokenizer_sha256=tokenizer.digest,
        )


def is_held_out(digest: bytes, share: float) -> bool:
    """Whether a document is held out when `share` of all documents are."""
    r = _rank(digest)
    return r % 10 * _B + r // 10 < share * 10 * _B


def _rank(digest: bytes) -> int:
    """The integer r of a document, which decides its side."""
    return int.from_bytes(digest[:8], "big")


@contextmanager
def seen_texts(path: Path) -> Iterator[Callable[[bytes], bool]]:
    """A function that stores the digest of a text in a temporary file, and returns whether it is new.

    It raises `OSError` if the disk is full or read-only.
    """
    database = sqlite3.connect(path, isolation_level=None)
    for pragma in ("journal_mode = OFF", "synchronous = OFF", f"cache_size = -{_CACHE_KIB}"):
        database.execute(f"PRAGMA {pragma}")
    database.execute("CREATE TABLE seen (content BLOB PRIMARY KEY) WITHOUT ROWID")
    database.execute("BEGIN")

    def add(content: bytes) -> bool:
        try:
            return database.execute("INSERT OR IGNORE INTO seen VALUES (?)", (content,)).rowcount == 1
        except sqlite3.Error as error:
            raise OSError(f"cannot store the digests for --dedup: {error}") from error

    try:
        yield add
    finally:
        database.close()
        path.unlink()


def _training_texts(documents: Iterable[ReadDocument]) -> list[str]:
    """The texts to train a tokenizer on, in source order: those with the lowest digests that suffice.

    The texts are the same in every run, and a heap holds no more of them.
    """
    heap, characters = list[tuple[int, int, str]](), 0  # (-digest, number, text); the highest digest first
    for number, document in enumerate(documents):
        heapq.heappush(heap, (-int.from_bytes(document.digest, "big"), number, document.body))
        characters += len(document.body)
        while characters - len(heap[0][2]) >= TRAINING_CHARACTERS:
            characters -= len(heapq.heappop(heap)[2])
    key, number, last = heap[0]
    heap[0] = key, number, last[: TRAINING_CHARACTERS - (characters - len(last))]
    return [text for _, _, text in sorted(heap, key=itemgetter(1))]
