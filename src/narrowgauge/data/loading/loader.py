"""How do tokens become batches?

A window is `sequence_length` consecutive tokens; window w starts at token w x sequence_length, so windows lie
side by side and every token is met once an epoch. The target of a token is the one after it: y is x moved on
by one, and the last target of a window is the first token of the next.

So documents are packed: a window holds the end of one, some whole ones and the beginning of another. Unless
asked otherwise they are not kept apart; the end-of-document id between them is what a model learns to heed.
Kept `separate_documents`, each token comes with its position in its document (`stream`), for a model to look
no further back; and a document does not have to guess how the next begins: that target is IGNORED, but for
the id between documents itself, which is how a document ends.

Shapes: B sequences of a batch, T = sequence_length tokens of a sequence.
"""

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from narrowgauge.data.loading.sample_order import mixed_samples
from narrowgauge.data.token_files.token_file import Tokens
from narrowgauge.data.token_files.token_stream import Mixture, TokenStream, as_mixture
from narrowgauge.errors import UserError
from narrowgauge.models import IGNORED

Source = Mixture | TokenStream | Tokens


@dataclass(frozen=True, eq=False)
class Batch:
    """Token ids and targets, int64; unpacks into x_BT and y_BT.

    `position_BT` is None unless documents are kept apart; `targets` counts those that are not IGNORED.
    """

    x_BT: torch.Tensor
    y_BT: torch.Tensor
    targets: int
    position_BT: torch.Tensor | None = None

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter((self.x_BT, self.y_BT))

    @property
    def ignores(self) -> bool:
        """Whether some targets are IGNORED."""
        return self.targets < self.y_BT.numel()

    def to(self, device: torch.device) -> "Batch":
        """The batch on a device; from pinned memory the copy does not make the CPU wait."""
        position = self.position_BT
        return replace(
            self,
            x_BT=self.x_BT.to(device, non_blocking=True),
            y_BT=self.y_BT.to(device, non_blocking=True),
            position_BT=None if position is None else position.to(device, non_blocking=True),
        )

    def pinned(self) -> "Batch":
        """The batch in memory that a GPU can read by itself."""
        position = self.position_BT
        return replace(
            self,
            x_BT=self.x_BT.pin_memory(),
            y_BT=self.y_BT.pin_memory(),
            position_BT=None if position is None else position.pin_memory(),
        )


def count_windows(tokens: Source, sequence_length: int, part: str = "training") -> int:
    """The windows in `tokens`: the samples of an epoch.

    Errors: `UserError` where a stream has not one window and its last target; `part` names the tokens in it.
    """
    return sum(_windows(as_mixture(tokens), sequence_length, part))


def training_batch(
    tokens: Source,
    seed: int,
    first_sample: int,
    count: int,
    sequence_length: int,
    separate_documents: bool = False,
) -> Batch:
    """Samples first_sample .. first_sample + count - 1 of the run, on the CPU.

    A rank that takes its own slice of a step's samples asks for that slice. Errors: as `count_windows`.
    """
    mixture = as_mixture(tokens)
    windows = _windows(mixture, sequence_length, "training")
    stream_B, window_B = mixed_samples(seed, first_sample, count, windows, mixture.shares)
    return _batch(mixture, stream_B, window_B, sequence_length, separate_documents)


def validation_batches(
    tokens: Source,
    batch_size: int,
    sequence_length: int,
    limit: int | None = None,
    separate_documents: bool = False,
) -> Iterator[Batch]:
    """The same batches every time, on the CPU, at most `limit` of them (None: all).

    Where there are more windows than are asked for, those taken lie evenly over the held-out part, of all
    streams end to end. The last batch may have fewer sequences, so weigh losses by `targets`. Errors: as
    `count_windows`, at once.
    """
    mixture = as_mixture(tokens)
    end_S = np.cumsum(_windows(mixture, sequence_length, "held-out"))
    windows = int(end_S[-1])
    taken = windows if limit is None else min(windows, limit * batch_size)
    window_N = np.arange(taken, dtype=np.int64) * windows // taken
    stream_N = np.searchsorted(end_S, window_N, side="right")
    window_N -= np.append(0, end_S)[stream_N]
    parts = (slice(start, start + batch_size) for start in range(0, taken, batch_size))
    return (_batch(mixture, stream_N[p], window_N[p], sequence_length, separate_documents) for p in parts)


class Loader:
    """Training batches in order, made ahead in the background: a context manager that is iterated.

    `firsts` says which batches, by the first sample of each (`order.first_samples`). What comes out depends
    on seed and sample numbers alone, never on `workers` or `ahead`: a run that begins at a sample again
    meets the same batches, and a checkpoint has nothing to keep of a loader. `pin` is for a GPU.
    """

    def __init__(
        self,
        tokens: Source,
        seed: int,
        firsts: Iterator[int],
        count: int,
        sequence_length: int,
        separate_documents: bool = False,
        pin: bool = False,
        ahead: int = 8,
        workers: int = 1,
    ) -> None:
        assert ahead >= 1
        self._mixture, self._seed, self._firsts = as_mixture(tokens), seed, firsts
        self._count, self._length, self._apart, self._pin = count, sequence_length, separate_documents, pin
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="narrowgauge-loader")
        self._coming: deque[Future[Batch]] = deque()
        for _ in range(ahead):
            self._order_one()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """The next batch; raises what went wrong when it was made."""
        if not self._coming:
            raise StopIteration
        batch = self._coming.popleft().result()
        self._order_one()
        return batch

    def _order_one(self) -> None:
        first = next(self._firsts, None)
        if first is not None:
            self._coming.append(self._pool.submit(self._make, first))

    def _make(self, first: int) -> Batch:
        try:
            batch = training_batch(self._mixture, self._seed, first, self._count, self._length, self._apart)
            return batch.pinned() if self._pin else batch
        except Exception as error:
            name = threading.current_thread().name
            error.add_note(f"in the loader's thread {name}, making the batch of sample {first}")
            raise


def _windows(mixture: Mixture, sequence_length: int, part: str) -> list[int]:
    """The windows of each stream."""
    assert sequence_length >= 1
    windows = [(len(stream) - 1) // sequence_length for stream in mixture.streams]
    if min(windows) < 1:
        size = min(map(len, mixture.streams))
        raise UserError(
            f"the {part} part of the data holds {size} tokens, and a sequence of {sequence_length} "
            f"needs {sequence_length + 1}; bring more text or set data.sequence_length to "
            f"{max(size - 1, 1)} or less"
        )
    return windows


def _batch(
    mixture: Mixture,
    stream_B: NDArray[np.int64],
    window_B: NDArray[np.int64],
    sequence_length: int,
    separate_documents: bool,
) -> Batch:
    rows = np.empty((len(window_B), sequence_length + 1), dtype=np.int64)
    positions = np.empty((len(window_B), sequence_length), dtype=np.int64) if separate_documents else None
    targets = np.empty((len(window_B), sequence_length), dtype=np.int64)
    for b, (number, window) in enumerate(zip(stream_B, window_B, strict=True)):
        stream, start = mixture.streams[number], int(window) * sequence_length
        rows[b] = stream[start : start + sequence_length + 1]
        targets[b] = rows[b, 1:]
        if positions is not None:
            of_document = stream.positions(start, rows[b])
            positions[b] = of_document[:-1]
            begins_other = (of_document[1:] == 0) & ~np.isin(targets[b], stream.boundaries)
            targets[b, begins_other] = IGNORED
        ignored = stream.ignored(start + 1, start + sequence_length + 1)
        if ignored is not None:
            targets[b, ignored] = IGNORED
    x_BT, y_BT = torch.from_numpy(rows)[:, :-1].contiguous(), torch.from_numpy(targets)
    counted = int((targets != IGNORED).sum())
    return Batch(x_BT, y_BT, counted, None if positions is None else torch.from_numpy(positions))
