"""The size of a micro-batch: which sizes fit a batch and a device mesh, and the one that a run takes.

Each data-parallel process has an equal share of a step's sequences, in whole micro-batches. A pipeline needs
at least as many micro-batches as it has stages; with several chunks a multiple of them (interleaved 1F1B).

A size that the user gives is never changed. Where none is given (`training.fit_micro_batch`), a run takes the
largest that fits, up to `training.micro_batch_size`: the default, or what an existing run already has.
"""

from math import isqrt

from narrowgauge.distributed import ParallelDims
from narrowgauge.training.config.schema import TrainingSection


def fitting_sizes(batch_size: int, dims: ParallelDims) -> list[int]:
    """Sizes of a micro-batch that fit, ascending; none where the processes cannot have equal shares.

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
    """The largest size of at most `most` sequences that fits, or `most` if none does."""
    return max((size for size in fitting_sizes(batch_size, dims) if size <= most), default=most)


def held_out_sequences(training: TrainingSection, batches: int) -> int:
    """Sequences of a validation of so many micro-batches: those of one process.

    A micro-batch that was chosen smaller for several processes takes none away, so that a validation is of
    the same text on any number of them, also after a resume.
    """
    size = training.micro_batch_size
    if training.fit_micro_batch:
        most = TrainingSection.model_fields["micro_batch_size"].default
        size = largest_size(training.batch_size, ParallelDims(), most)
    return batches * size


def next_batch_size(training: TrainingSection, dims: ParallelDims) -> int:
    """The least batch that fits and is no smaller; with this micro-batch where it was given."""
    unit = dims.data * dims.pipeline * (1 if training.fit_micro_batch else training.micro_batch_size)
    return -(-training.batch_size // unit) * unit


def what_fits(training: TrainingSection, dims: ParallelDims) -> str:
    """The keys and values that would fit, as the end of an error's sentence."""
    micro, more = training.micro_batch_size, f"--training.batch_size {next_batch_size(training, dims)}"
    sizes = fitting_sizes(training.batch_size, dims)
    if not sizes:
        return f"set {more}"
    near = sorted(sorted(sizes, key=lambda size: abs(size - micro))[:4], reverse=True)
    listed = " or ".join(map(str, near))
    return f"set --training.micro_batch_size {listed}, leave it out and one is chosen, or set {more}"
