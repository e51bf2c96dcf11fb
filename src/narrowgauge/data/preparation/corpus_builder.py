"""Builds one corpus: digests files, reads and encodes documents, writes token files and the manifest."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from narrowgauge.data.cache import Progress
from narrowgauge.data.corpus import LAYOUT_VERSION, MANIFEST_FILE, CorpusManifest
from narrowgauge.data.preparation.document_filter import (
    REJECTED_FILE,
    TRAIN,
    VAL,
    DocumentFilter,
    Options,
)
from narrowgauge.data.preparation.encode import Batch, encode_chunk, read_chunk
from narrowgauge.data.preparation.shard_writer import ShardWriter
from narrowgauge.data.preparation.training_texts import TrainingTexts
from narrowgauge.data.preparation.worker_pool import ordered_map
from narrowgauge.data.sources import no_text
from narrowgauge.data.sources.byte_stream import unreadable
from narrowgauge.data.sources.records import Chunk, Input, Source
from narrowgauge.data.sources.text import PIECE_ENOUGH
from narrowgauge.data.token_files.token_file import TokenFile, token_dtype
from narrowgauge.data.tokenization.formats import TOKENIZER_FILE
from narrowgauge.data.tokenization.names import make_tokenizer
from narrowgauge.data.tokenization.tokenizer import load_tokenizer
from narrowgauge.errors import UserError
from narrowgauge.files import sha256_of, write_whole


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

    def run(self) -> None:
        """Fill the directory; a source of one document is cut into pieces."""
        is_trained = self.identity == self.name and self.name.startswith("bpe-")
        texts = self._training_texts() if is_trained else []
        if texts is not None:
            make_tokenizer(self.name, self._reported(texts)).save(self.staging / TOKENIZER_FILE)
        if texts is None or not self._encode():
            for path in self.staging.iterdir():
                path.unlink()
            replace(self, cut=True).run()

    def _training_texts(self) -> list[str] | None:
        """Read the source for texts to train the tokenizer on; None if it is one document."""
        with DocumentFilter(self.source.name, self.options, self.staging) as document_filter:
            training = TrainingTexts(document_filter)
            for batch in self._batches("read", partial(read_chunk, self.cut), document_filter):
                training.add(batch)
            is_enough = self._is_enough(document_filter)
        (self.staging / REJECTED_FILE).unlink(missing_ok=True)  # written again, as the source is read again
        return training.texts() if is_enough else None

    def _batches(
        self, stage: str, work: Callable[[Chunk], Batch], document_filter: DocumentFilter
    ) -> Iterator[Batch]:
        """The results of `work` for all chunks of the source, in order."""
        done = 0
        for batch in ordered_map(work, self.source.chunks(self.files.inputs), self.workers):
            yield batch
            done += batch.size
            self.files.report(stage, done, self.files.total, f"{document_filter.kept:,} documents")

    def _reported(self, texts: list[str]) -> Iterator[str]:
        for number, text in enumerate(texts, 1):
            self.files.report("learn", number, len(texts), "")
            yield text

    def _encode(self) -> bool:
        """Encode the documents and write all files; returns whether there are enough documents."""
        path = self.staging / TOKENIZER_FILE
        vocab_size, sha256 = load_tokenizer(path).vocab_size, sha256_of(path)
        with (
            DocumentFilter(self.source.name, self.options, self.staging) as document_filter,
            ShardWriter(self.staging, vocab_size, document_filter) as shard_writer,
        ):
            work = partial(encode_chunk, path, sha256, self.cut)
            for batch in self._batches("encode", work, document_filter):
                shard_writer.add(batch)
            is_enough = self._is_enough(document_filter)
            if is_enough:
                self._write(shard_writer, vocab_size, sha256)
        return is_enough

    def _is_enough(self, document_filter: DocumentFilter) -> bool:
        """Whether there are documents for both parts; a single one may still be cut, none is an error."""
        document_filter.check_tolerance()
        self.files.check()
        if not document_filter.kept:
            raise no_text(self.source.name)
        if document_filter.kept == 1 and self.cut:
            raise UserError(
                f"data source {self.source.name!r} is a single document, not long enough for pieces of "
                f"{PIECE_ENOUGH:,} characters, and a corpus needs two, one of them held out; add text"
            )
        return document_filter.kept > 1

    def _write(self, shard_writer: ShardWriter, vocab_size: int, tokenizer_sha256: str) -> None:
        """Write the token files and, last, the manifest."""
        written, document_filter = shard_writer.write(), shard_writer.document_filter
        documents = document_filter.digest.hexdigest()
        manifest = CorpusManifest(
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
            train_tokens=sum(file.count for file in written[TRAIN].values()),
            val_tokens=sum(file.count for file in written[VAL].values()),
            train=_facts(written[TRAIN]),
            val=_facts(written[VAL]),
            tokenizer_sha256=tokenizer_sha256,
        )
        write_whole(self.staging / MANIFEST_FILE, manifest.to_json())


def _corpus_digest(identity: str, documents: str, options: Options) -> str:
    """The digest of the tokens; the default held-out share is omitted, as older corpora did not have one."""
    parts = ["layout 1", identity, documents]
    if options.val_fraction != Options.val_fraction:
        parts.append(f"held out {options.val_fraction}")
    return hashlib.sha256("\n".join(parts).encode("utf-8")).hexdigest()


def _facts(files: dict[str, TokenFile]) -> list[dict[str, Any]]:
    return [{"name": name, "tokens": file.count, "sha256": file.sha256} for name, file in files.items()]
