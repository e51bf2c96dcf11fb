"""What a run will take, before it is started: the memory of a step by class of tensor.

The account is the run's own (`training/memory.py`), so a plan and the run cannot disagree on what exists.
"""

from rich.console import Console
from rich.table import Table

from narrowgauge.training import Config, cheaper, choose_device, expected, gib
from narrowgauge.training.machine import bytes_of, device_name, total_memory


def print_plan(config: Config, console: Console) -> None:
    """Print the expected memory of a configuration, whether it fits, and what would lower it."""
    memory = expected(config)
    table = Table(box=None, header_style="bold")
    table.add_column("class")
    for column in ("bytes a parameter", "device", "host"):
        table.add_column(column, justify="right")
    for name, size in memory.device.items():
        on_host = memory.host.get(name, 0)
        share = (size + on_host) / memory.parameters
        table.add_row(name, f"{share:.2f}", gib(size), gib(on_host) if on_host else "")
    total = sum(memory.host.values())
    table.add_row("together", "", gib(memory.peak), gib(total) if total else "", style="bold")
    t = config.training
    console.print(
        f"{config.model.name}, {memory.parameters:,} parameters, recipe {config.recipe.name}: "
        f"micro-batches of {t.micro_batch_size} x {config.data.sequence_length} tokens",
        highlight=False,
    )
    console.print(table)
    device = choose_device(t.device)
    limit = bytes_of(t.memory_limit) or total_memory(device)
    of = f"training.memory_limit {t.memory_limit}" if t.memory_limit else device_name(device)
    has_host = device.type != "cpu" or bool(t.memory_limit)  # a limit stands for a GPU that is not here
    peak = memory.peak if has_host else memory.peak + total
    fits = "fits" if peak <= limit else "does not fit"
    console.print(f"{fits}: {gib(peak)} of {gib(limit)} ({of})", highlight=False)
    for words, other in sorted(cheaper(config, has_host), key=lambda item: item[1].peak):
        note = "" if other.peak <= limit else ", which does not fit either"
        console.print(f"with {words}: {gib(other.peak)}{note}", highlight=False, markup=False)
