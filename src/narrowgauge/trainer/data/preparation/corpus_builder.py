"""Builds one corpus: digests files, reads and encodes documents, writes token files and the manifest."""

import hashlib
import heapq
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from narrowgauge.system.errors import UserError
from narrowgauge.system.files import sha256_of, write_whole
from narrowgauge.trainer.data.cache import Progress
from narrowgauge.trainer.data.corpus import LAYOUT_VERSION, MANIFEST_FILE, CorpusManifest, WrittenFile
from narrowgauge.trainer.data.preparation.document_filter import (
    REJECTED_FILE,
    TRAIN,
    VAL,
    DocumentFilter,
    Options,
)
from narrowgauge.trainer.data.preparation.encode import Batch, ReadDocument, encode_chunk, read_chunk
from narrowgauge.trainer.data.preparation.worker_pool import ordered_map
from narrowgauge.trainer.data.sources import no_text
from narrowgauge.trainer.data.sources.records import Chunk, Input, Source, unreadable
from narrowgauge.trainer.data.sources.text import PIECE_ENOUGH
from narrowgauge.trainer.data.token_files.token_file import TokenFile, TokenWriter, shard_paths, token_dtype
from narrowgauge.trainer.data.tokenization.formats import TOKENIZER_FILE
from narrowgauge.trainer.data.tokenization.tokenizer import load_tokenizer, make_tokenizer

MOST_TOKENS = 1 << 30  # in one token file
TRAINING_CHARACTERS = 8 << 20  # more text changes the merges little, but costs time and memory


class SourceFiles:
    """The files of a source with their digests; reports progress and detects later changes.

    `inputs` are the files to read: equal ones under one name.
    """

    def __init__(self, source: Source, report: Progress) -> None:
        self.source, self.report = source, report
        self.stats = [file.path.stat() for file in source.inputs]
        self.total = sum(stat.st_size for stat in self.stats)
        self.facts = list[dict[str, Any]]()
        first, inputs = dict[str, str](), list[Input]()
        self._digested = 0
        for file, stat in zip(source.inputs, self.stats, strict=True):
            try:
                sha256 = sha256_of(file.path, follow_links=True, advance=self._advance)
            except OSError as error:
                raise unreadable(file.path, error) from None
            self.facts.append({"name": file.name, "bytes": stat.st_size, "sha256": sha256})
            # The name decides the side of a text; equal files share one, so that neither shows the other.
            inputs.append(replace(file, name=first.setdefault(sha256, file.name)))
        self.inputs = tuple(inputs)

    def _advance(self, size: int) -> None:
        self._digested += size
        self.report("digest", self._digested, self.total, "")

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


@dataclass(frozen=True)
class CorpusBuilder:
    """The build of one corpus."""

    staging: Path  # the directory to fill
    source: Source
    name: str  # of the tokenizer
    identity: str  # `tokenizer_identity(name)`
    request: str  # the digest of all inputs and options
    options: Options
    files: SourceFiles
    workers: int
    cut: bool = False  # whether documents are cut into pieces
    moved: int | None = None  # the number of the document that changes sides

    def run(self) -> None:
        """Fill the directory; once all is read it may turn out that it must be read again, otherwise."""
        again: CorpusBuilder | None = self
        while again is not None:
            for path in self.staging.iterdir():
                path.unlink()
            again = again._build()

    def _build(self) -> "CorpusBuilder | None":
        """Fill the directory; returns the builder that must do it instead, if one must."""
        texts = TrainingTexts()
        if self.identity == self.name and self.name.startswith("bpe-"):
            with closing(self._filter()) as document_filter:
                for side, document in self._documents("read", partial(read_chunk, self.cut), document_filter):
                    if side == TRAIN:
                        texts.add(document)
                if again := self._instead(document_filter):
                    return again
            (self.staging / REJECTED_FILE).unlink(missing_ok=True)  # the source is read again
        path = self.staging / TOKENIZER_FILE
        make_tokenizer(self.name, self._reported(texts.texts())).save(path)
        vocab_size, sha256 = load_tokenizer(path).vocab_size, sha256_of(path)
        writers = dict[str, TokenWriter]()
        with ExitStack() as stack:
            document_filter = stack.enter_context(closing(self._filter()))
            for side in (TRAIN, VAL):
                writer = TokenWriter(shard_paths(self.staging, side), vocab_size, MOST_TOKENS)
                writers[side] = stack.enter_context(writer)
            work = partial(encode_chunk, path, sha256, self.cut)
            for side, document in self._documents("encode", work, document_filter):
                writers[side].write(document.ids)
            if again := self._instead(document_filter):
                return again
        written = {side: self._renamed(side, writer.written) for side, writer in writers.items()}
        manifest = self._manifest(document_filter, written, vocab_size, sha256)
        write_whole(self.staging / MANIFEST_FILE, manifest.to_json())
        return None

    def _filter(self) -> DocumentFilter:
        return DocumentFilter(self.source.name, self.options, self.staging, self.moved)

    def _renamed(self, side: str, written: dict[Path, TokenFile]) -> list[WrittenFile]:
        """The facts of the files of a side; the name of a single one loses its number."""
        if len(written) == 1:
            written = {path.rename(self.staging / f"{side}.bin"): file for path, file in written.items()}
        return [WrittenFile(name=p.name, tokens=f.count, sha256=f.sha256) for p, f in written.items()]

    def _documents(
        self, stage: str, work: Callable[[Chunk], Batch], document_filter: DocumentFilter
    ) -> Iterator[tuple[str, ReadDocument]]:
        """The side of each document that is kept and what `work` makes of it, in the order of the source."""
        done = 0
        for batch in ordered_map(work, self.source.chunks(self.files.inputs), self.workers):
            document_filter.reject(batch.rejected)
            for document in batch.documents:
                if (side := document_filter.side(document)) is not None:
                    yield side, document
            done += batch.size
            self.files.report(stage, done, self.files.total, f"{document_filter.kept:,} documents")

    def _reported(self, texts: list[str]) -> Iterator[str]:
        for number, text in enumerate(texts, 1):
            self.files.report("learn", number, len(texts), "")
            yield text

    def _instead(self, document_filter: DocumentFilter) -> "CorpusBuilder | None":
        """The builder that must read the source again, so that both sides have a document.

        A single document is cut into pieces; of several on one side, one moves to the other.
        """
        document_filter.check_tolerance()
        self.files.check()
        if not document_filter.kept:
            raise no_text(self.source.name)
        if document_filter.kept > 1:
            moved = document_filter.to_move()
            return None if moved is None else replace(self, moved=moved)
        if self.cut:
            raise UserError(
                f"data source {self.source.name!r} is a single document, not long enough for pieces of "
                f"{PIECE_ENOUGH:,} characters, and a corpus needs two, one of them held out; add text"
            )
        return replace(self, cut=True)

    def _manifest(
        self,
        document_filter: DocumentFilter,
        written: dict[str, list[WrittenFile]],
        vocab_size: int,
        tokenizer_sha256: str,
    ) -> CorpusManifest:
        documents = document_filter.digest.hexdigest()
        return CorpusManifest(
            layout=LAYOUT_VERSION,
            version=version("narrowgauge"),
            source=self.source.name,
            files=self.files.facts,
            tokenizer=self.name,
            tokenizer_identity=self.identity,
            options=asdict(self.options),
            request=self.request,
            digest=_corpus_digest(self.identity, documents, self.options),
            documents_sha256=documents,
            vocab_size=vocab_size,
            dtype=token_dtype(vocab_size).name,
            train_documents=document_filter.documents[TRAIN],
            val_documents=document_filter.documents[VAL],
            duplicates=document_filter.duplicates,
            rejected=document_filter.rejected,
            train_tokens=sum(file.tokens for file in written[TRAIN]),
            val_tokens=sum(file.tokens for file in written[VAL]),
            train=written[TRAIN],
            val=written[VAL],
            tokenizer_sha256=tokenizer_sha256,
        )


def _corpus_digest(identity: str, documents: str, options: Options) -> str:
    """The digest of the tokens; the default held-out share is omitted, as older corpora did not have one."""
    parts = ["layout 1", identity, documents]
    if options.val_fraction != Options.val_fraction:
        parts.append(f"held out {options.val_fraction}")
    return hashlib.sha256("\n".join(parts).encode("utf-8")).hexdigest()
