"""The parallel dimensions of a run: resolves `[parallel]` for a number of processes, and checks it."""

from narrowgauge.distributed import ParallelDims, check_blocks, check_tensor_parallel, resolve_dims
from narrowgauge.errors import UserError
from narrowgauge.training.config.config import Config


def parallel_dims_of(config: Config, processes: int) -> ParallelDims:
    """The dimensions of `[parallel]` for a number of processes.

    Raises:
        UserError: their product is another number, or model, batch or settings do not allow them.
    """
    parallel_dims = resolve_dims(ParallelDims(**config.parallel.model_dump()), processes)
    model, t, data = config.resolved_model(), config.training, parallel_dims.data
    length = config.data.sequence_length
    check_tensor_parallel(model, length, parallel_dims)
    check_blocks(model, config.resolved_recipe(), length, t.micro_batch_size, parallel_dims)
    if t.batch_size % (data * t.micro_batch_size):
        fitting = [n for n in range(1, t.batch_size + 1) if t.batch_size % (n * t.micro_batch_size) == 0]
        raise UserError(
            f"training.batch_size = {t.batch_size} in micro-batches of {t.micro_batch_size} cannot be cut "
            f"over parallel.replicate x parallel.shard = {data} processes; these fit: "
            f"{', '.join(map(str, fitting))}"
        )
    _check_pipeline(parallel_dims, t.batch_size // (data * t.micro_batch_size))
    if parallel_dims.size > 1 and t.compile:
        raise UserError(
            "training.compile = true with several processes: compiled code does not know of the others; "
            "set --training.compile false"
        )
    return parallel_dims


def _check_pipeline(parallel_dims: ParallelDims, micro_batches: int) -> None:
    """Check that the schedule of the pipeline can run this number of micro-batches a step."""
    if parallel_dims.chunks > 1 and parallel_dims.pipeline == 1:
        raise UserError(
            f"parallel.chunks = {parallel_dims.chunks} with parallel.pipeline = 1: chunks are the stages of "
            "each process of a pipeline; set chunks to 1, or pipeline to 2 or more"
        )
    if micro_batches < parallel_dims.pipeline:
        raise UserError(
            f"parallel.pipeline = {parallel_dims.pipeline} needs as many micro-batches a step, and there are "
            f"{micro_batches}; raise training.batch_size, or lower training.micro_batch_size"
        )
    if parallel_dims.chunks > 1 and micro_batches % parallel_dims.pipeline:
        raise UserError(
            f"parallel.chunks = {parallel_dims.chunks}: {micro_batches} micro-batches a step are no multiple "
            f"of parallel.pipeline = {parallel_dims.pipeline}; change training.micro_batch_size, or set "
            "chunks to 1"
        )
