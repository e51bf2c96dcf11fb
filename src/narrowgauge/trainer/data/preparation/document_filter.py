"""Decides which documents are kept and which of these are held out.

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
import json
import sqlite3
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.data.preparation.workers import ReadDocument
from narrowgauge.trainer.data.sources.records import Rejected

REJECTED_FILE = "rejected.jsonl"
TRAIN, VAL = "train", "val"

_ENOUGH_RECORDS = 1000  # from here on, the share of rejected records is checked while reading
_CACHE_KIB = 1 << 16  # memory for the digests of texts
_B = -(-(2**64) // 10)


def rank(digest: bytes) -> int:
    """The integer r of a document, which decides its side."""
    return int.from_bytes(digest[:8], "big")


def is_held_out(digest: bytes, share: float) -> bool:
    """Whether a document is held out when `share` of all documents are."""
    r = rank(digest)
    return r % 10 * _B + r // 10 < share * 10 * _B


class SeenTexts:
    """The digests of all texts so far, in a temporary file."""

    def __init__(self, path: Path) -> None:
        self._path, self._database = path, sqlite3.connect(path, isolation_level=None)
        for pragma in ("journal_mode = OFF", "synchronous = OFF", f"cache_size = -{_CACHE_KIB}"):
            self._database.execute(f"PRAGMA {pragma}")
        self._database.execute("CREATE TABLE seen (content BLOB PRIMARY KEY) WITHOUT ROWID")
        self._database.execute("BEGIN")

    def close(self) -> None:
        """Delete the file."""
        self._database.close()
        self._path.unlink()

    def add(self, content: bytes) -> bool:
        """Add a text; returns whether it is new. Raises `OSError` if the disk is full or read-only."""
        try:
            return self._database.execute("INSERT OR IGNORE INTO seen VALUES (?)", (content,)).rowcount == 1
        except sqlite3.Error as error:
            raise OSError(f"cannot store the digests for --dedup: {error}") from error


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


class DocumentFilter:
    """Decides for each document in order whether it is kept and on which side, and counts its decisions.

    `staging` is the directory for temporary files and rejected.jsonl, `moved` the number of the document that
    changes sides, if one does.
    """

    def __init__(self, source: str, options: Options, staging: Path, moved: int | None = None) -> None:
        self.source, self.options, self.moved = source, options, moved
        self.documents = {TRAIN: 0, VAL: 0}
        self.duplicates = self.rejected = 0
        self.digest = hashlib.sha256()
        self.first_rejected: Rejected | None = None
        self._rejected_path = staging / REJECTED_FILE
        self._rejected_path.unlink(missing_ok=True)  # of an earlier reading
        self._seen = SeenTexts(staging / "seen") if options.dedup else None
        self._extremes = list[tuple[int, int]]()  # rank and number of the document of the lowest and highest

    def close(self) -> None:
        """Delete the temporary files."""
        if self._seen:
            self._seen.close()

    @property
    def kept(self) -> int:
        """The documents kept on both sides."""
        return self.documents[TRAIN] + self.documents[VAL]

    def side(self, document: ReadDocument) -> str | None:
        """The side of the next document, or None for a duplicate."""
        if self._seen and not self._seen.add(document.content):
            self.duplicates += 1
            return None
        self.digest.update(document.digest)
        number, held_out = self.kept, is_held_out(document.digest, self.options.val_fraction)
        ranks = [*self._extremes, (rank(document.digest), number)]
        self._extremes = [min(ranks, key=itemgetter(0)), max(ranks, key=itemgetter(0))]
        side = VAL if held_out != (number == self.moved) else TRAIN
        self.documents[side] += 1
        return side

    def to_move(self) -> int | None:
        """The number of the document that must change sides because a side is empty; None if none must."""
        lowest, highest = self._extremes
        return lowest[1] if not self.documents[VAL] else highest[1] if not self.documents[TRAIN] else None

    def reject(self, records: list[Rejected]) -> None:
        """Raise an error for the first record, or write all to rejected.jsonl, depending on the options."""
        if not records:
            return
        if self.options.tolerance is None:
            raise UserError(str(records[0]))
        self.first_rejected = self.first_rejected or records[0]
        self.rejected += len(records)
        with self._rejected_path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({"where": r.where, "reason": r.reason}) + "\n" for r in records)
        if self.kept + self.duplicates + self.rejected >= _ENOUGH_RECORDS:
            self.check_tolerance()

    def check_tolerance(self) -> None:
        """Raise an error if more records were rejected than the options allow."""
        total = self.kept + self.duplicates + self.rejected
        if self.options.tolerance is not None and self.rejected > self.options.tolerance * total:
            raise UserError(
                f"{self.rejected} of {total} records of {self.source!r} were rejected "
                f"({self.rejected / total:.1%}), more than the {self.options.tolerance:.1%} that --tolerant "
                f"allows; the first: {self.first_rejected}"
            )
