"""A prepared corpus: a directory of files that are published together and never changed afterwards.

| file             | content                                                                          |
|------------------|----------------------------------------------------------------------------------|
| `train.bin`      | the training tokens, in the layout of `tokens`; if there are too many for        |
|                  | one file, `train_000000.bin` and so on                                           |
| `val.bin`        | the tokens of the held-out documents, in the same layout                         |
| `tokenizer.json` | the tokenizer                                                                    |
| `rejected.jsonl` | the rejected records, with location and reason; absent if there are none         |
| `manifest.json`  | sources, options, and the sha256 of the other files                              |

The `digest` identifies the content: it is computed from the tokenizer, every document and the held-out share,
and from nothing else. Two corpora with the same digest hold the same tokens (if the same version of
`tokenizers` trained them). The `request` identifies the inputs: the digests of the files read, the tokenizer
and the options.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from narrowgauge.system.errors import UserError
from narrowgauge.system.files import sha256_of
from narrowgauge.trainer.data.token_files.tokens import (
    Dataset,
    Mixture,
    TokenFile,
    TokenStream,
    damaged,
    open_token_file,
)
from narrowgauge.trainer.data.tokenization.formats import TOKENIZER_FILE
from narrowgauge.trainer.data.tokenization.tokenizer import load_tokenizer

LAYOUT_VERSION = 2
MANIFEST_FILE = "manifest.json"

Written = Annotated[list[TokenFile], Field(min_length=1)]


class CorpusManifest(BaseModel):
    """The content of manifest.json; digests are hexadecimal sha256."""

    model_config = TokenFile.model_config

    layout: int
    version: str
    source: str
    files: list[dict[str, Any]]  # name, bytes and sha256 of each input
    tokenizer: str  # the name the user asked for
    tokenizer_identity: str  # `tokenization.tokenizer.tokenizer_identity` of it
    options: dict[str, Any]
    request: str
    digest: str
    documents_sha256: str
    vocab_size: int
    dtype: str
    train_documents: int
    val_documents: int
    duplicates: int
    rejected: int
    train_tokens: int
    val_tokens: int
    train: Written
    val: Written
    tokenizer_sha256: str

    def to_json(self) -> str:
        """The text of manifest.json. It has no times and no paths, so that manifests can be compared."""
        return json.dumps(self.model_dump(), indent=2) + "\n"


@dataclass(frozen=True, eq=False)
class Corpus(Dataset):
    """A prepared corpus; `train` and `val` are read-only token ids, memory-mapped from their files."""

    directory: Path
    manifest: CorpusManifest


def is_corpus(directory: Path) -> bool:
    """Whether the directory holds a prepared corpus, intact or damaged."""
    try:
        return (directory / MANIFEST_FILE).is_file() and (directory / TOKENIZER_FILE).is_file()
    except OSError:  # a name that is too long, a locked folder: the next reader reports it
        return False


def open_corpus(directory: Path) -> Corpus:
    """Open the prepared corpus in `directory`; the digest of every file is checked."""
    manifest, path = read_manifest(directory), directory / TOKENIZER_FILE
    if not path.is_file():
        raise damaged(path, "it is missing")
    if sha256_of(path, follow_links=True) != manifest.tokenizer_sha256:
        raise damaged(path, "its sha256 has changed since it was written")
    tokenizer = load_tokenizer(path)
    if tokenizer.vocab_size != manifest.vocab_size:
        raise damaged(path, f"it has {tokenizer.vocab_size} ids, but the tokens need {manifest.vocab_size}")

    def part(files: list[TokenFile]) -> Mixture:
        verified = (open_token_file(directory / file.name, file, manifest.vocab_size) for file in files)
        return Mixture((TokenStream(tuple(verified), (tokenizer.end_of_document,)),))

    return Corpus(tokenizer, part(manifest.train), part(manifest.val), manifest.digest, directory, manifest)


def read_manifest(directory: Path) -> CorpusManifest:
    """The manifest of the corpus in `directory`; a `UserError` if it is missing, damaged or outdated."""
    path = directory / MANIFEST_FILE
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise UserError(
            f"there is no prepared corpus in {directory}; make one with "
            f"`narrowgauge prepare SOURCE --out {directory}`"
        ) from None
    except ValueError as error:
        raise damaged(path, f"it is not JSON ({error})") from None
    if not isinstance(facts, dict) or "layout" not in facts:
        raise UserError(f"{path} is not the manifest of a prepared corpus; name another directory")
    if type(layout := facts.get("layout")) is int and layout != LAYOUT_VERSION:
        raise UserError(
            f"the corpus in {directory} has layout {layout}, but this narrowgauge reads layout "
            f"{LAYOUT_VERSION}; delete the directory and prepare it again"
        )
    try:
        return CorpusManifest.model_validate(facts)
    except ValidationError as error:
        key = ".".join(map(str, error.errors()[0]["loc"]))
        message = error.errors()[0]["msg"]
        raise damaged(path, f"its keys or their types do not match ({key}: {message})") from None
