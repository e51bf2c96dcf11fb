"""Training batches, prefetched by background threads."""

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Self

from narrowgauge.trainer.data.loading.batch import Batch, Source, training_batch
from narrowgauge.trainer.data.token_files.token_stream import as_mixture


class Loader(AbstractContextManager["Loader"]):
    """An iterator over training batches, prefetched in the background; use it as a context manager.

    Batches depend only on the seed and the sample numbers, never on `workers` or `prefetch`: a run that
    resumes at a sample gets the same batches, and a checkpoint stores no loader state.

    Args:
        tokens: The training tokens.
        seed: Seed of the sample order.
        firsts: The first sample of each batch (`sample_order.first_samples`).
        count: Sequences in a batch.
        sequence_length: Tokens in a sequence.
        separate_documents: As for `training_batch`.
        pin: Whether to put batches into pinned memory, for a GPU.
        prefetch: Number of batches made in advance.
        workers: Number of threads that make them.
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
        prefetch: int = 8,
        workers: int = 1,
    ) -> None:
        assert prefetch >= 1
        self._mixture, self._seed, self._firsts = as_mixture(tokens), seed, firsts
        self._count, self._length, self._pin = count, sequence_length, pin
        self._separate_documents = separate_documents
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="narrowgauge-loader")
        self._pending: deque[Future[Batch]] = deque()
        for _ in range(prefetch):
            self._submit_next()

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """The next batch; an error of the thread that made it is raised here."""
        if not self._pending:
            raise StopIteration
        batch = self._pending.popleft().result()
        self._submit_next()
        return batch

    def _submit_next(self) -> None:
        first = next(self._firsts, None)
        if first is not None:
            self._pending.append(self._pool.submit(self._make, first))

    def _make(self, first: int) -> Batch:
        try:
            batch = training_batch(
                self._mixture, self._seed, first, self._count, self._length, self._separate_documents
            )
            return batch.pinned() if self._pin else batch
        except Exception as error:
            name = threading.current_thread().name
            error.add_note(f"in the loader's thread {name}, making the batch of sample {first}")
            raise
