"""Prepares a source as a corpus.

    files -> chunks -> documents -> kept or not, held out or not -> token ids -> train.bin, val.bin
    (reader)           (workers)    (this process, in their order)  (workers)    (this process)

The files are digested first. Their digests, the tokenizer and the options decide whether the corpus already
exists. With an existing tokenizer, the source is then read once. A tokenizer that has to be trained needs the
text before there are ids (`TrainingTexts`), so the source is read twice. Memory does not depend on the
length of the source, and the result does not depend on the number of workers.

**Atomic.** The corpus is built in a staging directory and renamed, so any corpus that exists is complete. If
two processes prepare the same corpus at once, both build it, one publishes it, and both use that one. The
same files, tokenizer and options give the same bytes: times, paths and the order of arrival do not matter.
"""

import hashlib
import heapq
import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from narrowgauge.system.errors import UserError
from narrowgauge.system.files import cache_directory, sha256_of, staged_directory, user_path, write_whole
from narrowgauge.trainer.data.cache import Progress, no_progress
from narrowgauge.trainer.data.corpus import (
    LAYOUT_VERSION,
    MANIFEST_FILE,
    Corpus,
    CorpusManifest,
    is_corpus,
    open_corpus,
)
from narrowgauge.trainer.data.preparation.document_filter import TRAIN, VAL, DocumentFilter, Options
from narrowgauge.trainer.data.preparation.workers import (
    ReadChunk,
    ReadDocument,
    encode_chunk,
    ordered_map,
    read_chunk,
    usable_cores,
)
from narrowgauge.trainer.data.sources import no_text, open_source
from narrowgauge.trainer.data.sources.records import Chunk, Input, Source, unreadable
from narrowgauge.trainer.data.sources.text import PIECE_ENOUGH
from narrowgauge.trainer.data.token_files.token_file import TokenFile, TokenWriter, shard_paths, token_dtype
from narrowgauge.trainer.data.tokenization.formats import TOKENIZER_FILE
from narrowgauge.trainer.data.tokenization.tokenizer import (
    Tokenizer,
    load_tokenizer,
    make_tokenizer,
    parallel_tokenizing,
    tokenizer_identity,
)

DEFAULT_TOKENIZER = "bpe-4096"
MOST_TOKENS = 1 << 30  # in one token file
TRAINING_CHARACTERS = 8 << 20  # more text changes the merges little, but costs time and memory
_FEW_BYTES = 8 << 20  # below this, starting processes takes longer than they save


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
    options, name = options or Options(), tokenizer or DEFAULT_TOKENIZER
    if workers is not None and workers < 1:
        raise UserError(f"--workers {workers} must be at least 1")
    identity = tokenizer_identity(name)  # refuses a misspelt tokenizer before anything is read
    opened = open_source(source, options.text_key)
    files = SourceFiles(opened, progress or no_progress)
    facts = [LAYOUT_VERSION, identity, asdict(options), opened.identity, files.facts]
    request = hashlib.sha256(json.dumps(facts, sort_keys=True).encode("utf-8")).hexdigest()
    target = directory or cache_directory() / "tokens" / f"{_slug(source)}-{_slug(name)}-{request[:12]}"
    _require_usable(target)
    if not (target / MANIFEST_FILE).exists():
        few = 0 < files.total < _FEW_BYTES
        workers = workers or (1 if few else usable_cores())
        try:
            with staged_directory(target, keep_existing=True) as staging, parallel_tokenizing():
                _Build(staging, files, name, identity, request, options, workers).run()
        except OSError as error:
            raise UserError(
                f"cannot write the corpus to {target}: {error.strerror or error}; name a directory with room "
                "in --out or NARROWGAUGE_CACHE"
            ) from error
    corpus = open_corpus(target)
    if corpus.manifest.request != request:
        raise UserError(
            f"{target} holds another corpus ({corpus.manifest.source} with {corpus.manifest.tokenizer}, "
            f"request {corpus.manifest.request[:12]}, not {request[:12]}); delete it or name another "
            "directory"
        )
    return corpus


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


class SourceFiles:
    """The files of a source with their digests; reports progress and detects later changes."""

    def __init__(self, source: Source, report: Progress) -> None:
        self.source, self.report = source, report
        self.stats = [file.path.stat() for file in source.inputs]
        self.total = sum(stat.st_size for stat in self.stats)
        self.facts = list[dict[str, Any]]()
        self.inputs = list[Input]()  # the files to read: equal ones under one name
        first, digested = dict[str, str](), 0

        def advance(size: int) -> None:
            nonlocal digested
            digested += size
            report("digest", digested, self.total, "")

        for file, stat in zip(source.inputs, self.stats, strict=True):
            try:
                sha256 = sha256_of(file.path, follow_links=True, advance=advance)
            except OSError as error:
                raise unreadable(file.path, error) from None
            self.facts.append({"name": file.name, "bytes": stat.st_size, "sha256": sha256})
            # The name decides the side of a text; equal files share one, so that neither shows the other.
            self.inputs.append(replace(file, name=first.setdefault(sha256, file.name)))

    def check(self) -> None:
        """Raise an error if a file has changed since it was digested."""
        for file, before in zip(self.source.inputs, self.stats, strict=True):
            now = file.path.stat() if file.path.exists() else None
            if now is None or (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
                raise UserError(
                    f"data source {self.source.name!r} changed while it was read, at {file.name}; prepare it "
                    "again"
                )


class TrainingTexts:
    """The texts to train a tokenizer on: of training documents only, and the same ones in every run.

    They are those with the lowest digests, until there are enough characters; a heap holds no more.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, str]] = []  # (-digest, number, text); the highest digest first
        self._characters = self._number = 0  # sum over the heap, and documents so far

    def add(self, document: ReadDocument) -> None:
        """Offer the next document: keep the fewest with the lowest digests that suffice."""
        self._number += 1
        heapq.heappush(self._heap, (-int.from_bytes(document.digest, "big"), self._number, document.text))
        self._characters += len(document.text)
        while self._characters - len(self._heap[0][2]) >= TRAINING_CHARACTERS:
            self._characters -= len(heapq.heappop(self._heap)[2])

    def texts(self) -> list[str]:
        """The texts in source order."""
        left, chosen = TRAINING_CHARACTERS, list[tuple[int, str]]()
        for _, number, text in sorted(self._heap, reverse=True):
            chosen.append((number, text[:left]))
            left -= len(text[:left])
        return [text for _, text in sorted(chosen)]


class _ReadAgain(Exception):
    """One side is without a document; the source has to be read again, otherwise."""


@dataclass
class _Build:
    """The build of one corpus."""

    staging: Path  # the directory to fill
    files: SourceFiles
    name: str  # of the tokenizer
    identity: str  # `tokenizer_identity(name)`
    request: str  # the digest of all inputs and options
    options: Options
    workers: int
    cut: bool = False  # whether documents are cut into pieces
    moved: int | None = None  # the number of the document that changes sides

    def run(self) -> None:
        """Fill the directory; once all is read it may turn out that it must be read again, otherwise."""
        while True:
            for path in self.staging.iterdir():
                path.unlink()
            with suppress(_ReadAgain):
                return self._fill()

    def _fill(self) -> None:
        texts = TrainingTexts()
        if self.identity == self.name and self.name.startswith("bpe-"):
            for side, document in self._documents("read", partial(read_chunk, self.cut)):
                if side == TRAIN:
                    texts.add(document)
        path = self.staging / TOKENIZER_FILE
        tokenizer = make_tokenizer(self.name, self._reported(texts.texts()))
        tokenizer.save(path)
        writers = dict[str, TokenWriter]()
        with ExitStack() as stack:
            for side in (TRAIN, VAL):
                writer = TokenWriter(shard_paths(self.staging, side), tokenizer.vocab_size, MOST_TOKENS)
                writers[side] = stack.enter_context(writer)
            for side, document in self._documents(
                "encode", partial(encode_chunk, path, tokenizer.digest, self.cut)
            ):
                writers[side].write(document.ids)
        manifest = self._manifest(
            tokenizer, *(self._renamed(side, writers[side].written) for side in writers)
        )
        write_whole(self.staging / MANIFEST_FILE, manifest.to_json())

    def _documents(
        self, stage: str, work: Callable[[Chunk], ReadChunk]
    ) -> Iterator[tuple[str, ReadDocument]]:
        """The side of each document that is kept and what `work` makes of it, in the order of the source.

        After the last one, both sides must have a document. So a single document is cut into pieces, and of
        several on one side, one moves to the other: `_ReadAgain`.
        """
        source, done = self.files.source, 0
        self.filter = DocumentFilter(source.name, self.options, self.staging, self.moved)
        with closing(self.filter):
            for chunk in ordered_map(work, source.chunks(self.files.inputs), self.workers):
                self.filter.reject(chunk.rejected)
                for document in chunk.documents:
                    if (side := self.filter.side(document)) is not None:
                        yield side, document
                done += chunk.size
                self.files.report(stage, done, self.files.total, f"{self.filter.kept:,} documents")
        self.filter.check_tolerance()
        self.files.check()
        if not self.filter.kept:
            raise no_text(source.name)
        if self.filter.kept == 1 and self.cut:
            raise UserError(
                f"data source {source.name!r} is a single document, not long enough for pieces of "
                f"{PIECE_ENOUGH:,} characters, and a corpus needs two, one of them held out; add text"
            )
        if self.filter.kept == 1:
            self.cut = True
            raise _ReadAgain
        if (number := self.filter.to_move()) is not None:
            self.moved = number
            raise _ReadAgain

    def _reported(self, texts: list[str]) -> Iterator[str]:
        for number, text in enumerate(texts, 1):
            self.files.report("learn", number, len(texts), "")
            yield text

    def _renamed(self, side: str, written: list[TokenFile]) -> list[TokenFile]:
        """The files of a side; the name of a single one loses its number."""
        if len(written) > 1:
            return written
        file = written[0].model_copy(update={"name": f"{side}.bin"})
        (self.staging / written[0].name).rename(self.staging / file.name)
        return [file]

    def _manifest(self, tokenizer: Tokenizer, train: list[TokenFile], val: list[TokenFile]) -> CorpusManifest:
        documents = self.filter.digest.hexdigest()
        parts = ["layout 1", self.identity, documents]
        if self.options.val_fraction != Options.val_fraction:  # older corpora had no other
            parts.append(f"held out {self.options.val_fraction}")
        return CorpusManifest(
            layout=LAYOUT_VERSION,
            version=version("narrowgauge"),
            source=self.files.source.name,
            files=self.files.facts,
            tokenizer=self.name,
            tokenizer_identity=self.identity,
            options=asdict(self.options),
            request=self.request,
            digest=hashlib.sha256("\n".join(parts).encode("utf-8")).hexdigest(),
            documents_sha256=documents,
            vocab_size=tokenizer.vocab_size,
            dtype=token_dtype(tokenizer.vocab_size).name,
            train_documents=self.filter.documents[TRAIN],
            val_documents=self.filter.documents[VAL],
            duplicates=self.filter.duplicates,
            rejected=self.filter.rejected,
            train_tokens=sum(file.tokens for file in train),
            val_tokens=sum(file.tokens for file in val),
            train=train,
            val=val,
            tokenizer_sha256=tokenizer.digest,
        )
