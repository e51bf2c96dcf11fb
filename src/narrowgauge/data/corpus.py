"""What does a prepared corpus consist of?

A directory of four files, published together and never changed afterwards:

| file             | content                                                                          |
|------------------|----------------------------------------------------------------------------------|
| `train.bin`      | the tokens that are trained on, in the layout of `token_file`                    |
| `val.bin`        | the tokens of the held-out documents, likewise                                   |
| `tokenizer.json` | how text became these tokens                                                     |
| `manifest.json`  | what it was made from, and the sha256 of the other three                         |

The `digest` names the corpus: it is made of the layout's version, the tokenizer and every document, and of
nothing else. Two corpora with one digest hold the same tokens (learnt by one version of `tokenizers`).
"""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from narrowgauge.data.token_file import (
    TokenFile,
    Tokens,
    damaged,
    file_sha256,
    open_token_file,
    verify_token_file,
)
from narrowgauge.data.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer
from narrowgauge.errors import UserError

LAYOUT_VERSION = 1
TRAIN_FILE = "train.bin"
VAL_FILE = "val.bin"
MANIFEST_FILE = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """The facts of manifest.json; counts are of documents and of tokens, digests are hexadecimal sha256."""

    layout: int
    source: str
    tokenizer: str
    digest: str
    documents_sha256: str
    vocab_size: int
    dtype: str
    train_documents: int
    val_documents: int
    train_tokens: int
    val_tokens: int
    train_sha256: str
    val_sha256: str
    tokenizer_sha256: str

    def to_json(self) -> str:
        """The text of manifest.json: one fact a line, no time and no place, so that it can be compared."""
        return json.dumps(asdict(self), indent=2) + "\n"


@dataclass(frozen=True, eq=False)
class Corpus:
    """A prepared corpus: `train` and `val` are read-only token ids, mapped from their files."""

    directory: Path
    tokenizer: Tokenizer
    train: Tokens
    val: Tokens
    digest: str
    manifest: Manifest


def open_corpus(directory: Path, verify: bool = True) -> Corpus:
    """The prepared corpus in `directory`; `verify` reads every byte and compares the digests.

    Without `verify` the lengths and headers are checked still. Errors: `UserError` for a directory that is
    not a prepared corpus, and for a file that is not as it was written.
    """
    manifest = _read_manifest(directory)
    train = TokenFile(manifest.train_tokens, manifest.train_sha256)
    val = TokenFile(manifest.val_tokens, manifest.val_sha256)
    train_path, val_path = directory / TRAIN_FILE, directory / VAL_FILE
    tokenizer_path = directory / TOKENIZER_FILE
    if not tokenizer_path.is_file():
        raise damaged(tokenizer_path, "it is missing")
    if verify:
        if file_sha256(tokenizer_path) != manifest.tokenizer_sha256:
            raise damaged(tokenizer_path, "its sha256 is not the one it was written with")
        verify_token_file(train_path, train, manifest.vocab_size)
        verify_token_file(val_path, val, manifest.vocab_size)
    tokenizer = load_tokenizer(tokenizer_path)
    if tokenizer.vocab_size != manifest.vocab_size:
        raise damaged(
            tokenizer_path, f"it has {tokenizer.vocab_size} ids, and the tokens {manifest.vocab_size}"
        )
    return Corpus(
        directory,
        tokenizer,
        open_token_file(train_path, train),
        open_token_file(val_path, val),
        manifest.digest,
        manifest,
    )


def _read_manifest(directory: Path) -> Manifest:
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
    types = {field.name: field.type for field in fields(Manifest)}
    if not isinstance(facts, dict) or {name: type(value) for name, value in facts.items()} != types:
        raise damaged(path, f"it does not state just {', '.join(types)}")
    manifest = Manifest(**facts)
    if manifest.layout != LAYOUT_VERSION:
        raise UserError(
            f"the corpus in {directory} has layout {manifest.layout}, and this narrowgauge reads layout "
            f"{LAYOUT_VERSION}; delete the directory and prepare it again"
        )
    return manifest
