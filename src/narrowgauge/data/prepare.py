"""How does a source become a corpus?

    documents -> held out or not -> tokenizer -> token ids -> train.bin, val.bin

The source is read more than once and held in memory never, one batch of documents apart: first to digest and
divide the documents, then for the tokenizer to learn from, then to encode each of the two parts.

**Held out** is a tenth of the documents: those whose sha256, of name and text, is 0 mod 10 in its first eight
bytes. So a document stays on its side whatever comes and goes around it. Where all fall on one side, the
one whose hash is the lowest (or the highest) is moved to the other.

**Once only.** The corpus is built aside and renamed to its place, so it is whole wherever it is found. Two
processes that prepare the same corpus at once both build it, one of them publishes, both use that one. The
same documents and tokenizer give the same bytes: no time, no place and no order of arrival goes in.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from narrowgauge.data.corpus import (
    LAYOUT_VERSION,
    MANIFEST_FILE,
    TRAIN_FILE,
    VAL_FILE,
    Corpus,
    Manifest,
    open_corpus,
)
from narrowgauge.data.publish import whole_directory, whole_file
from narrowgauge.data.sources import Document, documents
from narrowgauge.data.token_file import file_sha256, token_dtype, write_token_file
from narrowgauge.data.tokenizer import (
    TOKENIZER_FILE,
    Tokenizer,
    make_tokenizer,
    parallel_tokenizing,
    tokenizer_identity,
)
from narrowgauge.errors import UserError

Progress = Callable[[str, int, int], None]

_HELD_OUT_ONE_IN = 10
_LEARN_FROM = (
    8 << 20
)  # characters the BPE learns from: more changes its merges little, and costs time and memory
_ENCODE_AT_ONCE = 4 << 20  # characters: enough to keep every core busy


@dataclass(frozen=True)
class _Survey:
    """What one reading of the source found; document i is the i-th of `documents(source)`."""

    digests: list[bytes]
    lengths: list[int]
    held_out: list[bool]

    @property
    def sha256(self) -> str:
        """One digest for all documents in their order."""
        return hashlib.sha256(b"".join(self.digests)).hexdigest()


def prepare(
    source: str, tokenizer: str, directory: Path | None = None, progress: Progress | None = None
) -> Corpus:
    """Make the corpus of `source` under `tokenizer`, or find it where it was made before.

    `directory` is where it goes; None: a folder of the cache that its digest names. `progress(stage, done,
    total)` is called as documents are read, learnt from and encoded; total is 0 where it is not known.

    Errors: `UserError` for a source, tokenizer or directory that will not do, and for a damaged corpus.
    """
    report = progress or (lambda stage, done, total: None)
    identity = tokenizer_identity(tokenizer)  # refuse a mistyped tokenizer before anything is read
    survey = _read_through(source, report)
    digest = _digest(f"layout {LAYOUT_VERSION}", identity, survey.sha256)
    target = directory or cache_directory() / "tokens" / f"{_slug(source)}-{_slug(tokenizer)}-{digest[:12]}"
    _refuse_foreign(target)
    if not (target / MANIFEST_FILE).exists():
        try:
            with whole_directory(target) as aside, parallel_tokenizing():
                _build(aside, source, tokenizer, digest, survey, report)
        except OSError as error:
            raise UserError(
                f"cannot write the corpus to {target}: {error.strerror}; "
                "name another in NARROWGAUGE_CACHE, one with room in it"
            ) from error
    corpus = open_corpus(target)
    if corpus.digest != digest:
        raise UserError(
            f"{target} holds another corpus ({corpus.manifest.source} with {corpus.manifest.tokenizer}, "
            f"digest {corpus.digest[:12]}, not {digest[:12]}); delete it or name another directory"
        )
    return corpus


def cache_directory() -> Path:
    """Where corpora go that were given no place: $NARROWGAUGE_CACHE, else narrowgauge in the user's cache."""
    if own := os.environ.get("NARROWGAUGE_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "narrowgauge"


def _read_through(source: str, report: Progress) -> _Survey:
    """Digest every document and decide which are held out."""
    digests, lengths = [], []
    for document in documents(source):
        digests.append(_document_digest(document))
        lengths.append(len(document.text))
        report("read", len(digests), 0)
    if len(digests) < 2:
        raise UserError(
            f"data source {source!r} is one document of {lengths[0]} characters, and a corpus needs two, one "
            "of them held out; add text (a single file counts as one document every 4096 characters or so)"
        )
    rank = [int.from_bytes(digest[:8], "big") for digest in digests]
    held_out = [r % _HELD_OUT_ONE_IN == 0 for r in rank]
    if not any(held_out):
        held_out[rank.index(min(rank))] = True
    if all(held_out):
        held_out[rank.index(max(rank))] = False
    return _Survey(digests, lengths, held_out)


def _build(aside: Path, source: str, name: str, digest: str, survey: _Survey, report: Progress) -> None:
    """Fill the directory `aside` with the four files."""
    tokenizer = make_tokenizer(name, _texts_to_learn_from(source, survey, report))
    tokenizer.save(aside / TOKENIZER_FILE)
    size = tokenizer.vocab_size
    train = write_token_file(aside / TRAIN_FILE, _tokens(source, survey, tokenizer, False, report), size)
    val = write_token_file(aside / VAL_FILE, _tokens(source, survey, tokenizer, True, report), size)
    val_documents = sum(survey.held_out)
    manifest = Manifest(
        layout=LAYOUT_VERSION,
        source=source,
        tokenizer=name,
        digest=digest,
        documents_sha256=survey.sha256,
        vocab_size=size,
        dtype=token_dtype(size).name,
        train_documents=len(survey.held_out) - val_documents,
        val_documents=val_documents,
        train_tokens=train.count,
        val_tokens=val.count,
        train_sha256=train.sha256,
        val_sha256=val.sha256,
        tokenizer_sha256=file_sha256(aside / TOKENIZER_FILE),
    )
    with whole_file(aside / MANIFEST_FILE) as file:
        file.write(manifest.to_json().encode("utf-8"))


def _texts_to_learn_from(source: str, survey: _Survey, report: Progress) -> Iterator[str]:
    """Training documents, the same for every run: by lowest digest until there are enough characters."""
    training = [i for i, held_out in enumerate(survey.held_out) if not held_out]
    chosen, left = dict[int, int](), _LEARN_FROM
    for i in sorted(training, key=survey.digests.__getitem__):
        if left > 0:
            chosen[i] = min(left, survey.lengths[i])
            left -= chosen[i]
    done = 0
    for i, document in enumerate(_unchanged(source, survey)):
        if i in chosen:
            done += 1
            report("learn", done, len(chosen))
            yield document.text[: chosen[i]]


def _tokens(
    source: str, survey: _Survey, tokenizer: Tokenizer, held_out: bool, report: Progress
) -> Iterator[NDArray[np.int64]]:
    """The ids of each document of one part, its end-of-document id first, as llm.c has it."""
    stage = "encode the held-out part" if held_out else "encode the training part"
    total, done = survey.held_out.count(held_out), 0
    for texts in _batches(source, survey, held_out):
        for ids in tokenizer.encode_batch(texts):
            yield np.array([tokenizer.end_of_document, *ids], dtype=np.int64)
        done += len(texts)
        report(stage, done, total)


def _batches(source: str, survey: _Survey, held_out: bool) -> Iterator[list[str]]:
    """The texts of one part, in lists of about `_ENCODE_AT_ONCE` characters."""
    batch, size = list[str](), 0
    for document, side in zip(_unchanged(source, survey), survey.held_out, strict=True):
        if side != held_out:
            continue
        batch.append(document.text)
        size += len(document.text)
        if size >= _ENCODE_AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _unchanged(source: str, survey: _Survey) -> Iterator[Document]:
    """The documents again, refused where they are not the ones that were surveyed."""
    count = 0
    for document in documents(source):
        if count == len(survey.digests) or _document_digest(document) != survey.digests[count]:
            raise UserError(
                f"data source {source!r} changed while it was read, at {document.name}; prepare it again"
            )
        count += 1
        yield document
    if count < len(survey.digests):
        raise UserError(f"data source {source!r} lost documents while it was read; prepare it again")


def _document_digest(document: Document) -> bytes:
    # A name may hold bytes of a file system that are not UTF-8; a text may not.
    name = hashlib.sha256(document.name.encode("utf-8", "surrogateescape")).digest()
    return hashlib.sha256(name + document.text.encode("utf-8")).digest()


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode("utf-8")).hexdigest()


def _refuse_foreign(target: Path) -> None:
    """Refuse a place that is taken by something else, before any work is done."""
    try:
        there = next(path for path in (target, *target.parents) if path.exists())
        if not there.is_dir():
            what = "is a file"
        elif there == target and any(target.iterdir()) and not (target / MANIFEST_FILE).exists():
            what = f"is not empty and has no {MANIFEST_FILE}, so it is not a prepared corpus"
        else:
            return
    except OSError as error:
        raise UserError(f"cannot look into {target}: {error.strerror}; name another directory") from None
    raise UserError(
        f"cannot write the corpus to {target}: {there} {what}; delete it or name another directory"
    )


def _slug(name: str) -> str:
    """A word for the name of a folder: the last part of a path, what is not plain replaced."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(name).name).strip("-.")[:40] or "text"
