"""The building of one corpus: what is read is digested, then read, encoded and written with its manifest."""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from narrowgauge.data.corpus import LAYOUT_VERSION, MANIFEST_FILE, CorpusManifest
from narrowgauge.data.preparation.document_buffer import DocumentBuffer
from narrowgauge.data.preparation.document_filter import TRAIN, VAL, DocumentFilter, Options
from narrowgauge.data.preparation.encode import Encoder, Packer
from narrowgauge.data.preparation.publish import whole_file
from narrowgauge.data.preparation.shard_writer import ShardWriter
from narrowgauge.data.preparation.worker_pool import ordered_map
from narrowgauge.data.sources import Chunk, Source, no_text
from narrowgauge.data.sources.byte_stream import ByteStream
from narrowgauge.data.token_files.token_file import TokenFile, file_sha256, token_dtype
from narrowgauge.data.tokenization.tokenizer import TOKENIZER_FILE, load_tokenizer, make_tokenizer
from narrowgauge.errors import UserError

# (stage, bytes done, bytes in all or 0 where that is not known, what else there is to say)
Progress = Callable[[str, int, int, str], None]
TOKENIZER_THREADS = "TOKENIZERS_PARALLELISM"
_BLOCK = 1 << 24  # bytes digested between two reports


class SourceFiles:
    """The files of a source, digested, and how far they have been read since."""

    def __init__(self, source: Source, report: Progress) -> None:
        self.source, self.report = source, report
        self.stats = [file.path.stat() for file in source.inputs]
        self.total = sum(stat.st_size for stat in self.stats)
        self.facts = list[dict[str, Any]]()
        self._digested = 0
        for file, stat in zip(source.inputs, self.stats, strict=True):
            self.facts.append({"name": file.name, "bytes": stat.st_size, "sha256": self._sha256(file.path)})

    def _sha256(self, path: Path) -> str:
        digest = hashlib.sha256()
        for block in ByteStream(path).raw(_BLOCK):
            digest.update(block)
            self._digested += len(block)
            self.report("digest", self._digested, self.total, "")
        return digest.hexdigest()

    def check(self) -> None:
        """Refuse a source that is not what was digested."""
        for file, before in zip(self.source.inputs, self.stats, strict=True):
            now = file.path.stat() if file.path.exists() else None
            if now is None or (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
                raise UserError(
                    f"data source {self.source.name!r} changed while it was read, at {file.name}; prepare it "
                    "again"
                )


@dataclass(frozen=True)
class CorpusBuilder:
    """One building of a corpus, in the directory `aside`."""

    aside: Path
    source: Source
    name: str
    identity: str
    request: str
    options: Options
    files: SourceFiles
    workers: int
    cut: bool = False

    def run(self) -> None:
        """Fill the directory; a source of one document is cut into pieces."""
        kept = self._with_learnt() if self._is_learnt() else self._with_given()
        if kept == 1 and not self.cut:
            for leftover in self.aside.iterdir():
                leftover.unlink()
            replace(self, cut=True).run()

    def _is_learnt(self) -> bool:
        return self.identity == self.name and self.name.startswith("bpe-")

    def _with_given(self) -> int:
        """With a tokenizer that exists: one reading."""
        make_tokenizer(self.name, []).save(self.aside / TOKENIZER_FILE)
        with DocumentFilter(self.source.name, self.options, self.aside) as document_filter:
            return self._encode(
                self.source.chunks(), self.files.total, document_filter, document_filter, self.cut
            )

    def _with_learnt(self) -> int:
        """With a tokenizer that is learnt from the documents: these lie on the disk meanwhile."""
        report = self.files.report
        with (
            DocumentFilter(self.source.name, self.options, self.aside) as document_filter,
            DocumentBuffer(self.aside / "texts", document_filter) as document_buffer,
        ):
            done = 0
            for batch in ordered_map(Packer(self.cut), self.source.chunks(), self.workers):
                document_buffer.add(batch)
                done += batch.size
                report("read", done, self.files.total, f"{document_filter.kept:,} documents")
            if not self._is_enough(document_filter):
                return document_filter.kept
            texts = self._reported(document_buffer.texts(), document_buffer.size)
            make_tokenizer(self.name, texts).save(self.aside / TOKENIZER_FILE)
            with DocumentFilter(self.source.name, self.options, self.aside, "seen-again") as again:
                return self._encode(
                    document_buffer.chunks(), document_buffer.size, again, document_filter, False
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
        """Encode the documents of the chunks and write all files; returns how many documents were kept."""
        encoder = Encoder(self.aside / TOKENIZER_FILE, cut)
        vocab_size = load_tokenizer(encoder.tokenizer).vocab_size
        with ShardWriter(self.aside, vocab_size, document_filter) as parts, _one_thread_each(self.workers):
            done = 0
            for batch in ordered_map(encoder, chunks, self.workers):
                parts.add(batch)
                done += batch.size
                facts = f"{document_filter.kept:,} documents  {sum(parts.tokens.values()):,} tokens"
                self.files.report("encode", done, total, facts)
            if self._is_enough(document_filter):
                self._write(parts, vocab_size, first)
        return document_filter.kept

    def _is_enough(self, document_filter: DocumentFilter) -> bool:
        """Whether the documents make a corpus; one alone may be cut, and none is refused."""
        document_filter.judge()
        self.files.check()
        if not document_filter.kept:
            raise no_text(self.source.name)
        if document_filter.kept == 1 and self.cut:
            raise UserError(
                f"data source {self.source.name!r} is one document of a few thousand characters, and a "
                "corpus needs two, one of them held out; add text"
            )
        return document_filter.kept > 1

    def _write(self, parts: ShardWriter, vocab_size: int, first: DocumentFilter) -> None:
        """The token files and, last, the manifest; `first` is the filter of the first reading."""
        written, document_filter = parts.write(), parts.document_filter
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
            rejected=first.rejected,
            train_tokens=_count(written[TRAIN]),
            val_tokens=_count(written[VAL]),
            train=_facts(written[TRAIN]),
            val=_facts(written[VAL]),
            tokenizer_sha256=file_sha256(self.aside / TOKENIZER_FILE),
        )
        with whole_file(self.aside / MANIFEST_FILE) as file:
            file.write(manifest.to_json().encode("utf-8"))


@contextmanager
def _one_thread_each(workers: int) -> Iterator[None]:
    """Where there are several workers, each tokenizes on one core."""
    before = os.environ.get(TOKENIZER_THREADS, "")
    if workers > 1:
        os.environ[TOKENIZER_THREADS] = "false"
    yield
    os.environ[TOKENIZER_THREADS] = before


def _corpus_digest(identity: str, documents: str, options: Options) -> str:
    """What names the tokens: the same as ever where a tenth is held out, so that runs go on."""
    parts = ["layout 1", identity, documents]
    if options.val_fraction != Options.val_fraction:
        parts.append(f"held out {options.val_fraction}")
    return hashlib.sha256("\n".join(parts).encode("utf-8")).hexdigest()


def _count(files: dict[str, TokenFile]) -> int:
    return sum(file.count for file in files.values())


def _facts(files: dict[str, TokenFile]) -> list[dict[str, Any]]:
    return [{"name": name, "tokens": file.count, "sha256": file.sha256} for name, file in files.items()]
