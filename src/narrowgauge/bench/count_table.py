"""Prints the count of a step."""

from rich.console import Console
from rich.table import Table

from narrowgauge.simulate.count import StepCount

_SINKS = 10


def print_count(count: StepCount, title: str, console: Console) -> None:
    """Print totals, the ten largest sinks, the memory in use at the peak, and the waits."""
    console.print(
        f"{title} ({count.backend}), {count.tokens} tokens, {count.gpu}: counted, not measured\n",
        soft_wrap=True,
    )
    console.print(_totals(count))
    plain, calibrated = count.tokens_per_s(), count.tokens_per_s(calibrated=True)
    console.print(
        f"\npeak memory {count.peak_bytes / 2**30:.1f} GiB; at best {calibrated:,.0f} tokens/s "
        f"({plain:,.0f} at the ceilings), {count.micro_batches} micro-batches a step\n"
        f"speeds: {count.speeds.words}; calibrated as whole steps of others reached them\n",
        highlight=False,
    )
    console.print("the largest sinks of a micro-batch:")
    console.print(_sinks(count))
    console.print("\nwhat is alive at the peak:")
    console.print(_held(count))
    for place, times in count.waits:
        console.print(f"the host waits {times} times a micro-batch in {place}", highlight=False)


def _totals(count: StepCount) -> Table:
    table = Table("", box=None, header_style="bold")
    table.add_column("a micro-batch", justify="right")
    table.add_column("the update", justify="right")
    plain = (count.micro_batch(), count.of_update())
    calibrated = (count.micro_batch(calibrated=True), count.of_update(calibrated=True))
    table.add_row("launches", *(f"{t.launches:,}" for t in plain))
    table.add_row("Python autograd functions", *(f"{t.functions:,}" for t in plain))
    table.add_row("waits of the host", *(f"{t.waits:,}" for t in plain))
    table.add_row("GB moved", *(f"{t.bytes / 1e9:,.1f}" for t in plain))
    table.add_row("TFLOP multiplied", *(f"{t.flops / 1e12:,.1f}" for t in plain))
    table.add_row("ms of the device at ceilings", *(f"{1e3 * t.seconds:,.1f}" for t in plain))
    table.add_row("ms of the device, calibrated", *(f"{1e3 * t.seconds:,.1f}" for t in calibrated))
    table.add_row("ms of the host, assumed", *(f"{1e3 * t.host_seconds:,.1f}" for t in plain))
    return table


def _sinks(count: StepCount) -> Table:
    table = Table("operation", box=None, header_style="bold")
    for column in ("ms", "launches", "GB"):
        table.add_column(column, justify="right")
    table.add_column("in")
    for sink in count.sinks()[:_SINKS]:
        gb, ms = sink.bytes / 1e9, 1e3 * sink.seconds
        table.add_row(sink.name, f"{ms:.2f}", f"{sink.launches:,}", f"{gb:.2f}", sink.site)
    return table


def _held(count: StepCount) -> Table:
    table = Table("GiB", box=None, header_style="bold")
    table.add_column("made by")
    table.add_column("in")
    held = count.largest_held()
    for part in held[:_SINKS]:
        table.add_row(f"{part.bytes / 2**30:.2f}", part.name, part.site)
    if rest := sum(part.bytes for part in held[_SINKS:]):
        table.add_row(f"{rest / 2**30:.2f}", "the others", "")
    return table
