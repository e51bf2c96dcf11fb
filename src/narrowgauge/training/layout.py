"""How a run is spread over its processes: the grid that `[parallel]` asks for, and what it may not be."""

from narrowgauge.distributed import Layout, check_division, fit
from narrowgauge.errors import UserError
from narrowgauge.training.config import Config


def layout_of(config: Config, processes: int) -> Layout:
    """The grid of `[parallel]` for so many processes.

    Raises:
        UserError: it has another number of processes, or model, batch or settings do not allow it.
    """
    layout = fit(Layout(**config.parallel.model_dump()), processes)
    check_division(config.the_model(), config.data.sequence_length, layout)
    t, data = config.training, layout.data
    if t.batch_size % (data * t.micro_batch_size):
        fitting = [n for n in range(1, t.batch_size + 1) if t.batch_size % (n * t.micro_batch_size) == 0]
        raise UserError(
            f"training.batch_size = {t.batch_size} in micro-batches of {t.micro_batch_size} cannot be cut "
            f"over parallel.replicate x parallel.shard = {data} processes; these fit: "
            f"{', '.join(map(str, fitting))}"
        )
    micro_batches = t.batch_size // (data * t.micro_batch_size)
    if layout.chunks > 1 and micro_batches % layout.pipeline:
        raise UserError(
            f"parallel.chunks = {layout.chunks}: {micro_batches} micro-batches a step are no multiple of "
            f"parallel.pipeline = {layout.pipeline}; change training.micro_batch_size, or set chunks to 1"
        )
    if layout.size > 1 and t.compile:
        raise UserError(
            "training.compile = true with several processes: compiled code does not know of the others; "
            "set --training.compile false"
        )
    return layout
