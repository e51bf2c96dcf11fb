"""Batches: windows of a token stream, with a target for each token, made in the background by a loader.

A window is `sequence_length` consecutive tokens; window w starts at token w x sequence_length. Windows do not
overlap, and every token is an input once an epoch. The target of a token is the next token: y is x shifted by
one, and the last target of a window is the first token of the next window.

Documents are therefore packed: a window holds the end of one, some complete ones and the start of another. By
default they are not separated, and the model learns what the end-of-document id between them means. With
`separate_documents`, each token comes with its position in its document (`tokens`), so that a model can
restrict attention to the document. The first token of the next document is then not predicted: its target is
IGNORED, unless it is the end-of-document id, which marks how a document ends.

Shapes: B sequences in a batch, T = sequence_length tokens in a sequence.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.data.loading.sample_order import mixed_samples
from narrowgauge.trainer.data.token_files.tokens import Mixture
from narrowgauge.trainer.models import IGNORED


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch; unpacks into x_BT and y_BT."""

    x_BT: torch.Tensor  # token ids, int64
    y_BT: torch.Tensor  # targets, int64
    targets: int  # the number of targets that are not IGNORED
    position_BT: torch.Tensor | None = None  # within the document, with `separate_documents`

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter((self.x_BT, self.y_BT))

    @property
    def ignores(self) -> bool:
        """Whether any target is IGNORED."""
        return self.targets < self.y_BT.numel()

    def to(self, device: torch.device) -> "Batch":
        """The batch on `device`; the copy is asynchronous from pinned memory."""
        return self.each(lambda tensor: tensor.to(device, non_blocking=True))

    def each(self, do: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        """The batch with `do` applied to each of its tensors."""
        position = self.position_BT
        moved = None if position is None else do(position)
        return replace(self, x_BT=do(self.x_BT), y_BT=do(self.y_BT), position_BT=moved)


def count_windows(tokens: Mixture, sequence_length: int, part: str = "training") -> int:
    """The number of windows in `tokens`, which is the number of samples in an epoch."""
    return sum(_windows(tokens, sequence_length, part))


def training_batch(
    tokens: Mixture,
    seed: int,
    first_sample: int,
    count: int,
    sequence_length: int,
    separate_documents: bool = False,
) -> Batch:
    """Samples first_sample .. first_sample + count - 1 of the run, on the CPU.

    Samples are counted from the start of the run, and each rank requests its own slice of those of a step.
    With `separate_documents` the batch has positions within documents (see the module).
    """
    windows = _windows(tokens, sequence_length, "training")
    stream_B, window_B = mixed_samples(seed, first_sample, count, windows, tokens.shares)
    return _batch(tokens, stream_B, window_B, sequence_length, separate_documents)


def validation_batches(
    tokens: Mixture,
    batch_size: int,
    sequence_length: int,
    sequences: int | None = None,
    separate_documents: bool = False,
) -> Iterator[Batch]:
    """Held-out batches on the CPU, the same on every call; the last may have fewer sequences than the others.

    Args:
        tokens: The held-out tokens.
        batch_size: Sequences in a batch; weight losses by `Batch.targets`.
        sequence_length: T.
        sequences: The maximum number of sequences; None = no limit. If there are more windows, the selected
            ones are spread evenly over the tokens of all streams.
        separate_documents: As for `training_batch`.
    """
    end_S = np.cumsum(_windows(tokens, sequence_length, "held-out"))
    windows = int(end_S[-1])
    taken = windows if sequences is None else min(windows, sequences)
    window_N = np.arange(taken, dtype=np.int64) * windows // taken
    stream_N = np.searchsorted(end_S, window_N, side="right")
    window_N -= np.append(0, end_S)[stream_N]
    parts = (slice(start, start + batch_size) for start in range(0, taken, batch_size))
    return (_batch(tokens, stream_N[p], window_N[p], sequence_length, separate_documents) for p in parts)


def _windows(mixture: Mixture, sequence_length: int, part: str) -> list[int]:
    """The number of windows of each stream."""
    assert sequence_length >= 1
    windows = [(len(stream) - 1) // sequence_length for stream in mixture.streams]
    if min(windows) < 1:
        size = min(map(len, mixture.streams))
        raise UserError(
            f"the {part} part of the data holds {size} tokens, and a sequence of {sequence_length} "
            f"needs {sequence_length + 1}; provide more text or set data.sequence_length to "
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
            position = stream.positions(start, rows[b])
            positions[b] = position[:-1]
            begins_next = (position[1:] == 0) & ~np.isin(targets[b], stream.boundaries)
            targets[b, begins_next] = IGNORED
    x_BT, y_BT = torch.from_numpy(rows)[:, :-1].contiguous(), torch.from_numpy(targets)
    counted = int((targets != IGNORED).sum())
    return Batch(x_BT, y_BT, counted, None if positions is None else torch.from_numpy(positions))


class Loader(Iterator[Batch], AbstractContextManager["Loader"]):
    """An iterator over training batches, prefetched in the background; use it as a context manager.

    Batches depend only on the seed and the sample numbers, never on `prefetch`: a run that resumes at a
    sample gets the same batches, and a checkpoint stores no loader state.

    Args:
        tokens: The training tokens.
        seed: Seed of the sample order.
        firsts: The first sample of each batch (`sample_order.first_samples`).
        count: Sequences in a batch.
        sequence_length: Tokens in a sequence.
        separate_documents: As for `training_batch`.
        pin: Whether to put batches into pinned memory, for a GPU.
        prefetch: Number of batches made in advance.
    """

    def __init__(
        self,
        tokens: Mixture,
        seed: int,
        firsts: Iterator[int],
        count: int,
        sequence_length: int,
        separate_documents: bool = False,
        pin: bool = False,
        prefetch: int = 8,
    ) -> None:
        assert prefetch >= 1

        def make(first: int) -> Batch:
            try:
                batch = training_batch(tokens, seed, first, count, sequence_length, separate_documents)
                return batch.each(torch.Tensor.pin_memory) if pin else batch
            except Exception as error:
                name = threading.current_thread().name
                error.add_note(f"in the loader's thread {name}, making the batch of sample {first}")
                raise

        self._pool = ThreadPoolExecutor(1, thread_name_prefix="narrowgauge-loader")
        self._submitted = (self._pool.submit(make, first) for first in firsts)
        self._pending = deque(islice(self._submitted, prefetch))

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __next__(self) -> Batch:
        """The next batch; an error of the thread that made it is raised here."""
        if not self._pending:
            raise StopIteration
        batch = self._pending.popleft().result()
        self._pending.extend(islice(self._submitted, 1))
        return batch
