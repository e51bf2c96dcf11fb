"""The size of a micro-batch: the sizes that fit a batch and a device mesh, and the one that a run uses.

Each data-parallel process has an equal share of a step's sequences, in whole micro-batches. A pipeline needs
at least as many micro-batches as it has stages; with several chunks a multiple of them (interleaved 1F1B).

A size that the user sets is never changed. Otherwise (`training.fit_micro_batch`) a run uses the largest that
fits, up to `training.micro_batch_size`: the default, or the size that an existing run already has.
"""

from math import isqrt

from narrowgauge.distributed import ParallelDims
from narrowgauge.trainer.training.config.schema import TrainingSection


def fitting_sizes(batch_size: int, dims: ParallelDims) -> list[int]:
    """The micro-batch sizes that fit, ascending; empty if the processes cannot have equal shares.

    >>> fitting_sizes(24, ParallelDims(shard=2))
    [1, 2, 3, 4, 6, 12]
    >>> fitting_sizes(24, ParallelDims(shard=2, pipeline=4, chunks=2))
    [1, 3]
    """
    share, rest = divmod(batch_size, dims.data)
    if rest:
        return []
    low = [n for n in range(1, isqrt(share) + 1) if share % n == 0]
    counts = {size: share // size for size in {*low, *(share // n for n in low)}}
    return sorted(
        size
        for size, count in counts.items()
        if count >= dims.pipeline and (dims.chunks == 1 or count % dims.pipeline == 0)
    )


def largest_size(batch_size: int, dims: ParallelDims, most: int) -> int:
    """The largest size that fits, up to `most` sequences; `most` if none fits."""
    return max((size for size in fitting_sizes(batch_size, dims) if size <= most), default=most)


def held_out_sequences(training: TrainingSection, batches: int) -> int:
    """The number of sequences of a validation of `batches` micro-batches of a single process.

    A micro-batch chosen smaller for several processes does not reduce it, so a validation uses the same text
    on any number of processes, and after a resume.
    """
    size = training.micro_batch_size
    if training.fit_micro_batch:
        most = TrainingSection.model_fields["micro_batch_size"].default
        size = largest_size(training.batch_size, ParallelDims(), most)
    return batches * size


def next_batch_size(training: TrainingSection, dims: ParallelDims) -> int:
    """The smallest batch of at least this size that fits, with this micro-batch if the user set it."""
    unit = dims.data * dims.pipeline * (1 if training.fit_micro_batch else training.micro_batch_size)
    return -(-training.batch_size // unit) * unit


def what_fits(training: TrainingSection, dims: ParallelDims) -> str:
    """The keys and values that would fit, to end an error message."""
    micro, more = training.micro_batch_size, f"--training.batch_size {next_batch_size(training, dims)}"
    sizes = fitting_sizes(training.batch_size, dims)
    if not sizes:
        return f"set {more}"
    near = sorted(sorted(sizes, key=lambda size: abs(size - micro))[:4], reverse=True)
    listed = " or ".join(map(str, near))
    return f"set --training.micro_batch_size {listed}, leave it out and one is chosen, or set {more}"
