"""Which documents are kept, and which of them are held out?

**Held out** is a share of the documents, a tenth unless told otherwise, by the sha256 of name and text: so a
document stays on its side whatever comes and goes around it. Let r be the first eight bytes of the digest as
a number. Its last decimal digit decides for tenths, and what stands before that digit within a tenth:

    u = (r mod 10 + (r div 10) / B) / 10,    B = ceil(2^64 / 10),    held out where u < share

A larger share holds out all that a smaller one does, and more. Where all documents fall on one side, the one
whose r is the lowest (or the highest) is moved to the other.

**Duplicates**, if they are to go, are documents whose text is that of an earlier one, byte for byte. What
has been met is kept on the disk, sixteen bytes a document, so that memory does not grow with it.
"""

import hashlib
import json
import sqlite3
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from narrowgauge.data.preparation.encode import EncodedDocument
from narrowgauge.data.sources import Rejected
from narrowgauge.errors import UserError

REJECTED_FILE = "rejected.jsonl"
TRAIN, VAL = "train", "val"

_JUDGED_EARLY = 1000  # records after which a share is one
_B = -(-(2**64) // 10)


def rank(digest: bytes) -> int:
    """The number of a document that decides its side."""
    return int.from_bytes(digest[:8], "big")


def is_held_out(digest: bytes, share: float) -> bool:
    """Whether the document is held out, where `share` of all are."""
    r = rank(digest)
    return r % 10 * _B + r // 10 < share * 10 * _B


class Seen:
    """The texts met so far, by their digests, in a file of its own."""

    def __init__(self, path: Path) -> None:
        self._base = sqlite3.connect(path, isolation_level=None)
        for line in ("PRAGMA journal_mode = OFF", "PRAGMA synchronous = OFF", "PRAGMA cache_size = -65536"):
            self._base.execute(line)
        self._base.execute("CREATE TABLE seen (content BLOB PRIMARY KEY) WITHOUT ROWID")
        self._base.execute("BEGIN")

    def __enter__(self) -> "Seen":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._base.close()

    def add(self, content: bytes) -> bool:
        """Whether the text is new."""
        return self._base.execute("INSERT OR IGNORE INTO seen VALUES (?)", (content,)).rowcount == 1


@dataclass(frozen=True)
class Options:
    """How documents are chosen: what share is held out, whether duplicates go, what share may be rejected.

    `tolerance` None: no record may be rejected. `text_key` is where the text of a line or row stands.
    """

    val_fraction: float = 0.1
    dedup: bool = False
    tolerance: float | None = None
    text_key: str = "text"

    def __post_init__(self) -> None:
        if not 0 < self.val_fraction < 1:
            raise UserError(
                f"the held-out share {self.val_fraction} is not between 0 and 1; 0.1 holds out a tenth"
            )
        if self.tolerance is not None and not 0 < self.tolerance < 1:
            raise UserError(
                f"the tolerated share {self.tolerance} is not between 0 and 1; 0.01 lets 1 % be set aside"
            )


class DocumentFilter:
    """Decides on each document, in order: kept or not, and on which side; counts what it decides."""

    def __init__(self, source: str, options: Options, aside: Path, seen: str = "seen") -> None:
        self.source, self.options = source, options
        self.documents = {TRAIN: 0, VAL: 0}
        self.duplicates = self.rejected = 0
        self.digest = hashlib.sha256()
        self.first_rejected: Rejected | None = None
        self._seen_path, self._rejected_path = aside / seen, aside / REJECTED_FILE
        self._seen: Seen | None = Seen(self._seen_path) if options.dedup else None
        self._stack = ExitStack()

    def __enter__(self) -> "DocumentFilter":
        if self._seen:
            self._stack.callback(self._seen_path.unlink)
            self._stack.enter_context(self._seen)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def kept(self) -> int:
        """The documents kept on both sides."""
        return self.documents[TRAIN] + self.documents[VAL]

    def side(self, found: EncodedDocument) -> str | None:
        """The side of the next document; None: it is a duplicate."""
        if self._seen and not self._seen.add(found.content):
            self.duplicates += 1
            return None
        self.digest.update(found.digest)
        side = VAL if is_held_out(found.digest, self.options.val_fraction) else TRAIN
        self.documents[side] += 1
        return side

    def reject(self, records: list[Rejected]) -> None:
        """Refuse the first, or set all of them aside, as the options say."""
        if not records:
            return
        if self.options.tolerance is None:
            raise UserError(str(records[0]))
        self.first_rejected = self.first_rejected or records[0]
        self.rejected += len(records)
        with self._rejected_path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({"where": r.where, "reason": r.reason}) + "\n" for r in records)
        if self.kept + self.duplicates + self.rejected >= _JUDGED_EARLY:
            self.judge()

    def judge(self) -> None:
        """Refuse the source where more was set aside than the options allow."""
        total = self.kept + self.duplicates + self.rejected
        if self.options.tolerance is not None and self.rejected > self.options.tolerance * total:
            raise UserError(
                f"{self.rejected} of {total} records of {self.source!r} were refused "
                f"({self.rejected / total:.1%}), more than the {self.options.tolerance:.1%} that --tolerant "
                f"allows; the first: {self.first_rejected}"
            )
