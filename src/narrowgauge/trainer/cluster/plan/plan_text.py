"""Prints a plan: memory by class, what would fit, traffic, time at best and expected, cost."""

import math
import shlex
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from narrowgauge.system.devices import imagine
from narrowgauge.system.units import human_bytes, human_duration
from narrowgauge.trainer.cluster.plan.budget import Price
from narrowgauge.trainer.cluster.plan.estimate import Estimate, Expectation
from narrowgauge.trainer.cluster.plan.plan import Plan, cost_of, price_of
from narrowgauge.trainer.models import count_parameters
from narrowgauge.trainer.simulate import cheaper
from narrowgauge.trainer.training.outline import placement

Parts = Iterator[str | Table]  # in the order in which they are printed


def print_plan(
    plan: Plan,
    console: Console,
    tokens: int = 0,
    price: Price | None = None,
    words: Sequence[str] = ("plan",),
) -> None:
    """Print a plan, and the options that lower its memory.

    `tokens` of 0 are those of `training.steps`, and `price` is the one that was asked for. `words` are the
    command line after the program's name; the line that fits begins with them.
    """
    for part in _parts(plan, tokens, price, words):
        if isinstance(part, str):
            console.print(part, highlight=False, markup=False, soft_wrap=True)
        else:
            console.print(part)


def _parts(plan: Plan, tokens: int, price: Price | None, words: Sequence[str]) -> Parts:
    """The sentences and tables of a plan."""
    yield from _memory(plan)
    yield from _options(plan, words)
    if plan.time is not None:
        yield from _traffic(plan.time)
        yield _time(plan, plan.time, tokens, price_of(plan, price))
        yield from _reasons(plan, plan.time, price)
    elif plan.backend is not None and plan.backend.name == "emulated":
        yield f"recipe {plan.config.recipe.name} is emulated here: {plan.backend.reason}"


def _memory(plan: Plan) -> Parts:
    memory, t, spec = plan.step.memory, plan.config.training, plan.config.spec
    table = _table("class", "bytes a parameter", "device", "host")
    for name, size in memory.device.items():
        on_host = memory.host.get(name, 0)
        if size + on_host:
            share = (size + on_host) / memory.parameters
            table.add_row(name, f"{share:.2f}", _bytes(size), _bytes(on_host))
    if plan.copy:
        table.add_row("copy of a save", "", "", _bytes(plan.copy))
    total = sum(memory.host.values()) + plan.copy
    table.add_row("together", "", _bytes(memory.peak), _bytes(total), style="bold")
    devices, each = plan.parallel_dims.size, plan.config.data.sequence_length
    several = f" on {devices:,} devices ({plan.parallel_dims.text})" if devices > 1 else ""
    active = f" ({count_parameters(spec.model, active=True):,} active)" if spec.model.experts else ""
    yield (
        f"{plan.config.model.name}, {memory.parameters:,} parameters{active}, recipe "
        f"{plan.config.recipe.name}: micro-batches of {t.micro_batch_size:,} x {each:,} tokens{several}"
    )
    yield from plan.chosen
    yield from placement(spec.model, spec.recipe, t.micro_batch_size * each)
    yield table
    fits, rest = "fits" if plan.fits else "does not fit", ""
    if plan.reserved:
        context = " and the driver's context" if plan.room.context else ""
        rest = f", of which {human_bytes(plan.reserved)} for fragmentation{context}"
    limit = f"{human_bytes(plan.room.limit)} ({plan.room.source})"
    yield f"{fits}: {human_bytes(plan.needed)} of {limit}{rest}"


def _options(plan: Plan, words: Sequence[str]) -> Parts:
    """The smallest number of devices, the line that fits, and the changes that lower the memory."""
    memory, batch = plan.step.memory, plan.config.training.batch_size
    if (fewest := plan.fewest) is None:
        yield (
            f"as it is, it fits on no number of devices that a batch of {batch:,} sequences can be cut over"
        )
    elif plan.parallel_dims.data > 1 or not plan.fits:
        mesh, size = fewest.parallel_dims, fewest.micro_batch_size
        axes = f" ({mesh.text})" if mesh.text else ""
        micro = f", in micro-batches of {size:,}" if size != plan.config.training.micro_batch_size else ""
        yield (
            f"smallest number of devices that fits: {mesh.size:,}{axes}{micro}, "
            f"{human_bytes(plan.room.needed(fewest.memory, mesh))} on each"
        )
    if plan.fitting is not None:
        options, found = plan.fitting
        needed = human_bytes(plan.room.needed(found, plan.parallel_dims))
        yield f"it fits with these changes, {needed}:\n  {_with_options(words, options)}"
    elif not plan.fits:
        on = "this device" if plan.parallel_dims.size == 1 else f"{plan.parallel_dims.size:,} devices"
        yield f"no setting and no recipe of narrower state makes it fit on {on}"
    with imagine(plan.gpu):
        others = cheaper(plan.config, plan.room.has_host, plan.parallel_dims, wider=not plan.fits)
    for option, other in sorted(others, key=lambda item: item[1].peak):
        if other.peak > 0.99 * memory.peak:  # it would not be noticed
            continue
        note = "" if plan.room.fits(other, plan.parallel_dims) else ", which does not fit either"
        yield f"with {option}: {human_bytes(other.peak)}{note}"


def _with_options(words: Sequence[str], options: str) -> str:
    """A command line with other values of some options."""
    changed = options.split()
    names = {*changed[::2], *(("--recipe.name",) if "--recipe" in changed else ())}
    kept: list[str] = []
    values = iter(words)
    for word in values:
        if word.partition("=")[0] not in names:
            kept.append(word)
        elif "=" not in word:
            next(values, None)  # its value
    return shlex.join(["narrowgauge", *kept, *changed])


def _traffic(time: Estimate) -> Parts:
    table = _table("sent by a device, a step", "ranks", "inside a node", "between nodes", "seconds")
    for v in time.volumes:
        table.add_row(v.purpose, f"{v.ranks:,}", _bytes(v.inside), _bytes(v.between), _figure(v.seconds))
    if time.volumes:
        yield table


def _time(plan: Plan, time: Estimate, tokens: int, price: Price | None) -> Table:
    e, devices = time.expected, plan.parallel_dims.size
    shares = [1.0] if e is None else [1.0, e.share]
    table = _table(f"a step of {time.tokens:,} tokens", *("at best", "expect")[: len(shares)])
    mark = ", emulated" if time.backend.name == "emulated" else ""
    names = [f"matmuls ({', '.join(time.formats)}{mark})", f"casts{mark}", "passes over memory", "update"]
    names += ["copies from and to the host", "waiting for links", "pipeline"]
    for name, seconds in zip(names, time.causes, strict=True):
        if seconds:
            table.add_row(f"  {name}", f"{_figure(seconds)} s")
    speed = time.tokens / time.seconds
    table.add_row("together", *(f"{_figure(time.seconds / share)} s" for share in shares), style="bold")
    table.add_row("tokens/s", *(f"{speed * share:,.0f}" for share in shares))
    if devices > 1:
        table.add_row(
            f"tokens/s of each of {devices:,}", *(f"{speed * share / devices:,.0f}" for share in shares)
        )
    table.add_row("MFU", *(f"{100 * time.mfu * share:.1f} %" for share in shares))
    budget = tokens or plan.config.training.steps * time.tokens
    costs = [cost_of(plan, budget, price, share) for share in shares]
    table.add_row(f"{budget:,} tokens", *(human_duration(86_400 * cost["days"]) for cost in costs))
    table.add_row("device-hours", *(_figure(cost["device-hours"]) for cost in costs))
    if devices > (per_node := plan.cluster.devices_per_node if plan.cluster else devices):
        nodes = (_figure(cost["device-hours"] / per_node) for cost in costs)
        table.add_row(f"node-hours, of {per_node} devices", *nodes)
    if price is not None:
        table.add_row("cost", *(str(Price(cost["price"], price.currency)) for cost in costs))
    return table


def _reasons(plan: Plan, time: Estimate, asked: Price | None) -> Parts:
    """Lines on the sources of the figures: the backend, the measured runs, the price."""
    assert plan.cluster is not None
    if time.backend.name == "emulated":
        why = time.backend.reason
        if not plan.cluster.gpu:
            why = 'the cluster file names no gpu (gpu = "sm_90"), so nothing narrow is taken to be native'
        yield (
            f"recipe {plan.config.recipe.name} is emulated on this device: {why}. Losses are real; the "
            f"time is that of {' and '.join(time.formats)} matmuls and of casts, which are "
            f"{100 * time.causes.casts / time.seconds:.0f} % of it. Waits of the host are not priced"
        )
    if time.attention:
        words = ", ".join(f"{product} {casts}" for product, casts in time.attention.items())
        yield f"attention: {words}; emulated in fp32, all scores, forward and backward"
    if time.expected is None:
        yield (
            "no column expect: nothing is counted, and the cluster's file has no measured run ([[measured]])"
        )
    else:
        yield _sources(time.expected, time)
    if (price := price_of(plan, asked)) is not None:
        source = "--price" if asked else "the cluster's file; --price overrides it"
        currency = "" if price.currency else ", in a currency that --price does not name"
        yield f"cost: at {price} a device-hour ({source}){currency}"


def _sources(e: Expectation, time: Estimate) -> str:
    """The count or the runs that an expectation comes from, in words."""
    if e.is_counted:
        micro = time.count.expected.further
        beside = f"; runs of others nearest to it reached {_interval(100 * e.least, 100 * e.most, '%')}"
        return (
            f"expect: {_figure(time.seconds_expected)} s a step, {100 * e.share:.0f} % of the best: counted "
            f"for this GPU{', and the copies from and to the host' if time.causes.copies else ''} "
            f"({micro.launches:,} launches and {micro.bytes / 1e9:,.0f} GB a micro-batch; "
            f"speeds: {time.count.words}){beside if e.runs else ''}; not measured with this program"
        )
    runs = ", ".join(f"{run.run} {100 * run.share:.0f} %" for run in e.runs)
    sources = "; ".join(dict.fromkeys(run.source for run in e.runs))
    ends = _interval(time.seconds / e.most, time.seconds / e.least, "s")
    between = f" ({ends} a step)" if e.most > e.least else ""
    return (
        f"expect: {100 * e.share:.0f} % of the best speed{between}, as the nearest measured runs reached: "
        f"{runs} (source: {sources}); this program was measured on no GPU"
    )


def _table(first: str, *figures: str) -> Table:
    table = Table(first, box=None, header_style="bold")
    for column in figures:
        table.add_column(column, justify="right")
    return table


def _figure(x: float) -> str:
    """Three digits, or all of a whole number from 100 on; no power of ten.

    >>> [_figure(x) for x in (12345.6, 15.52, 0.0003071, 0.0000849)]
    ['12,346', '15.5', '0.000307', '0.0000849']
    """
    if x >= 99.95 or not x:
        return f"{x:,.0f}"
    text = f"{x:.3g}"
    return text if "e" not in text else f"{x:.{2 - math.floor(math.log10(x))}f}"


def _interval(least: float, most: float, unit: str) -> str:
    """Both ends of an interval, or the one that both are printed as.

    >>> _interval(87.7, 87.9, "%"), _interval(61.2, 95, "s")
    ('88 %', '61.2 to 95 s')
    """
    ends = dict.fromkeys(f"{x:.0f}" if unit == "%" else _figure(x) for x in (least, most))
    return f"{' to '.join(ends)} {unit}"


def _bytes(size: int) -> str:
    """A size; nothing for none."""
    return human_bytes(size) if size else ""
