"""Builds one corpus: digests files, reads and encodes documents, writes token files and the manifest."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from narrowgauge.data.cache import Progress
from narrowgauge.data.corpus import LAYOUT_VERSION, MANIFEST_FILE, CorpusManifest
from narrowgauge.data.preparation.document_buffer import DocumentBuffer
from narrowgauge.data.preparation.document_filter import TRAIN, VAL, DocumentFilter, Options
from narrowgauge.data.preparation.encode import Encoder, Packer
from narrowgauge.data.preparation.shard_writer import ShardWriter
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

TOKENIZER_THREADS = "TOKENIZERS_PARALLELISM"


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
        kept = self._with_new_tokenizer() if is_trained else self._with_existing_tokenizer()
        if kept == 1 and not self.cut:
            for path in self.staging.iterdir():
                path.unlink()
            replace(self, cut=True).run()

    def _with_existing_tokenizer(self) -> int:
        """Read the source once; returns how many documents were kept."""
        make_tokenizer(self.name, []).save(self.staging / TOKENIZER_FILE)
        with DocumentFilter(self.source.name, self.options, self.staging) as document_filter:
            return self._encode(
                self.source.chunks(self.files.inputs),
                self.files.total,
                document_filter,
                document_filter,
                self.cut,
            )

    def _with_new_tokenizer(self) -> int:
        """Buffer the documents on disk, train the tokenizer on them, and encode them."""
        report = self.files.report
        with (
            DocumentFilter(self.source.name, self.options, self.staging) as document_filter,
            DocumentBuffer(self.staging / "texts", document_filter) as document_buffer,
        ):
            done = 0
            chunks = self.source.chunks(self.files.inputs)
            for batch in ordered_map(Packer(self.cut), chunks, self.workers):
                document_buffer.add(batch)
                done += batch.size
                report("read", done, self.files.total, f"{document_filter.kept:,} documents")
            if not self._is_enough(document_filter):
                return document_filter.kept
            texts = self._reported(document_buffer.texts(), document_buffer.size)
            make_tokenizer(self.name, texts).save(self.staging / TOKENIZER_FILE)
            with DocumentFilter(self.source.name, self.options, self.staging, "seen-again") as second:
                return self._encode(
                    document_buffer.chunks(), document_buffer.size, second, document_filter, False
                )

    def _reported(self, texts: Iterator[tuple[str, float]], size: int) -> Iterator[str]:
        for text, share in texts:
            self.files.report("learn", round(size * share), size, "")
            yield text

    def _encode(
        self,
        chunks: Iterator[Chunk],
        total: int,
        document_filter: DocumentFilter,
        first: DocumentFilter,
        cut: bool,
    ) -> int:
        """Encode the documents of the chunks and write all files; returns how many documents were kept.

        `first` is the filter of the first reading, which counted the rejected records.
        """
        encoder = Encoder(self.staging / TOKENIZER_FILE, cut)
        vocab_size = load_tokenizer(encoder.tokenizer).vocab_size
        with (
            ShardWriter(self.staging, vocab_size, document_filter) as shard_writer,
            _one_thread_each(self.workers),
        ):
            done = 0
            for batch in ordered_map(encoder, chunks, self.workers):
                shard_writer.add(batch)
                done += batch.size
                facts = f"{document_filter.kept:,} documents  {sum(shard_writer.tokens.values()):,} tokens"
                self.files.report("encode", done, total, facts)
            if self._is_enough(document_filter):
                self._write(shard_writer, vocab_size, first.rejected)
        return document_filter.kept

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

    def _write(self, shard_writer: ShardWriter, vocab_size: int, rejected: int) -> None:
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
            rejected=rejected,
            train_tokens=_count(written[TRAIN]),
            val_tokens=_count(written[VAL]),
            train=_facts(written[TRAIN]),
            val=_facts(written[VAL]),
            tokenizer_sha256=sha256_of(self.staging / TOKENIZER_FILE),
        )
        write_whole(self.staging / MANIFEST_FILE, manifest.to_json())


@contextmanager
def _one_thread_each(workers: int) -> Iterator[None]:
    """Let each of several workers tokenize on one core."""
    before = os.environ.get(TOKENIZER_THREADS, "")
    if workers > 1:
        os.environ[TOKENIZER_THREADS] = "false"
    yield
    os.environ[TOKENIZER_THREADS] = before


def _corpus_digest(identity: str, documents: str, options: Options) -> str:
    """The digest of the tokens; the default held-out share is omitted, as older corpora did not have one."""
    parts = ["layout 1", identity, documents]
    if options.val_fraction != Options.val_fraction:
        parts.append(f"held out {options.val_fraction}")
    return hashlib.sha256("\n".join(parts).encode("utf-8")).hexdigest()


def _count(files: dict[str, TokenFile]) -> int:
    return sum(file.count for file in files.values())


def _facts(files: dict[str, TokenFile]) -> list[dict[str, Any]]:
    return [{"name": name, "tokens": file.count, "sha256": file.sha256} for name, file in files.items()]
