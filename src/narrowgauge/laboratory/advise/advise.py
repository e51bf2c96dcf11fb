"""`advise`: from a machine, a model and a budget to the line that trains best."""

import math
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

from narrowgauge.cluster import Cluster, Price, cluster_name, cluster_names, load_cluster, parse_price
from narrowgauge.cluster.launch.site import site_names
from narrowgauge.cluster.plan.plan import make_plan, room_of
from narrowgauge.devices import imagine
from narrowgauge.distributed import ParallelDims
from narrowgauge.errors import UserError, require
from narrowgauge.forecast import Forecast, Forecaster
from narrowgauge.laboratory.advise.result import Advice, Answer
from narrowgauge.laboratory.advise.space import Point, Setting, Space, layouts
from narrowgauge.laboratory.settings import Values
from narrowgauge.models import count_block_weights, model_config
from narrowgauge.models.published import Published, published
from narrowgauge.recipes import choose_backend, recipe, recipe_names
from narrowgauge.runs import choose_device
from narrowgauge.runs.monitor.hardware import device_name
from narrowgauge.simulate import WholeCount, fitting
from narrowgauge.simulate.advice import narrower_recipes
from narrowgauge.training import Config, make_config
from narrowgauge.training.config.micro_batch import fitting_sizes
from narrowgauge.training.config.named import published_config
from narrowgauge.units import human_count, parse_count

RECIPES = ("bf16", "fp16", "fp8", "mxfp8", "nvfp4", "nvfp4-finish", "msamp-o2")
FIRST = 3
_SMALL = ("debug", "gpt2-debug", "ladder-1m", "moe-debug")  # no one published a training of these
Show = Callable[[str], object]


def advise(
    model: str,
    cluster: str | None = None,
    tokens: float | str | None = None,
    *,
    hours: float | None = None,
    money: float | None = None,
    devices: int = 1,
    recipes: Sequence[str] = (),
    price: str | None = None,
    sequence_length: int | None = None,
    batch_size: int | None = None,
    data: str | Path | None = None,
    show: Show | None = None,
) -> Advice:
    """Find the line that trains a model best on a machine, and why the alternatives lost.

    It searches recipe, micro-batch, recomputation, offload, chunked loss and parallel layout. The best takes
    the fewest device-hours for the loss that bf16 reaches: days by `plan`, times the tokens that buy the gap
    of `predict` back.

    Args:
        model: A named model.
        cluster: A shipped cluster, or a .toml file; None for this machine.
        tokens: Tokens to train on; None for the published ones, or those that hours or money pay for.
        hours: The most hours of all devices together in wall-clock time.
        money: The most money, in the currency of the price.
        devices: Devices in all.
        recipes: Recipes to choose from; none for those that the machine multiplies natively.
        price: The price of a device-hour, such as "2.50USD"; None for the cluster's.
        sequence_length: Tokens of a sequence; None for the published ones.
        batch_size: Sequences of a step; None for the published ones.
        data: The text or corpus that the lines name.
        show: Called with a sentence before each recipe and layout.

    Returns:
        At most three answers; `refused` holds the reason if there is none.

    Raises:
        UserError: A name or value is wrong.
    """
    require("recipes", recipes, Iterable)
    machine, name = _machine(cluster)
    found = published(model)
    defaults, notes = _defaults(model, found, sequence_length, batch_size, data)
    sized = model_config(name=model)
    budget = _tokens(tokens)
    if budget is None and hours is None and money is None:
        budget = None if found is None else found.tokens
    for option, value in (("hours", hours), ("money", money), ("devices", devices)):
        if value is not None and not (isinstance(value, int | float) and 0 < value < math.inf):
            raise UserError(f"{option} = {value!r}: it must be above 0")
    if devices > machine.devices_per_node and devices % machine.devices_per_node:
        raise UserError(
            f"devices = {devices}: a node of this cluster has {machine.devices_per_node}, and a run takes "
            f"whole nodes; take {devices // machine.devices_per_node * machine.devices_per_node}"
        )
    hour = parse_price("--price", str(price)) if price else machine.device_hour
    if missing := _missing(budget, hours, money, hour is not None):
        return Advice([], missing, notes=notes)
    limit = min(
        hours or math.inf, math.inf if money is None or hour is None else money / hour.amount / devices
    )
    line = _Line(model, name, machine.devices_per_node, defaults, found, None if data is None else str(data))
    size, forecaster = count_block_weights(sized), Forecaster()

    def answered(point: Point, one: str, dims: ParallelDims) -> Answer:
        forecast = partial(forecaster.forecast, recipe(one), size, name=one)
        return _answer(point, one, dims, line, (budget, limit), hour, forecast)

    shapes = layouts(devices, machine.devices_per_node, sized.heads, sized.layers)
    lost = {one: why for one in recipes or RECIPES if (why := _unfit(one, machine, bool(recipes)))}
    candidates = [one for one in recipes or RECIPES if one not in lost]
    answers, least = _search(candidates, shapes, defaults, machine, answered, lost, show)
    base = make_config(_put(defaults, micro_batch_size=defaults["training"]["batch_size"]))
    if not answers and not recipes:  # then all that may fit, emulated or not
        others = [one for one in narrower_recipes(base) if one not in candidates]
        answers, more = _search(others, shapes, defaults, machine, answered, lost, show)
        least += more
    return _advice(answers, least, lost, notes, machine, (budget, limit), model, devices, base)


def _search(
    candidates: Sequence[str],
    shapes: Sequence[ParallelDims],
    defaults: Values,
    machine: Cluster,
    answered: Callable[[Point, str, ParallelDims], Answer],
    lost: dict[str, str],
    show: Show | None,
) -> tuple[list[tuple[Answer, Point, ParallelDims]], list[tuple[Point, str, ParallelDims]]]:
    """The best answer of each recipe and layout, and the least memory where none fits; fills `lost`."""
    answers: list[tuple[Answer, Point, ParallelDims]] = []
    least: list[tuple[Point, str, ParallelDims]] = []
    batch = defaults["training"]["batch_size"]
    counts: dict[str, dict[Setting, WholeCount]] = {name: {} for name in candidates}
    for name, dims in product(candidates, shapes):
        label = f"{name} {dims.text}".strip()
        if not fitting_sizes(batch, dims):
            lost[label] = f"{dims.data} processes cannot share a batch of {batch} in {dims.pipeline} stages"
            continue
        if show is not None:
            show(f"advise {label} ...")
        space = Space({**defaults, "recipe": {"name": name}}, dims, machine, counts[name])
        try:
            best = space.best()
        except UserError as error:  # the recipe's blocks do not allow this layout
            lost[label] = str(error)
            continue
        if best is None:
            corner = space.least()
            least.append((corner, name, dims))
            lost[label] = f"does not fit: {corner.needed / 2**30:.1f} GiB with {corner.setting.words}"
        else:
            answers.append((answered(best, name, dims), best, dims))
    return answers, least


def _advice(
    answers: list[tuple[Answer, Point, ParallelDims]],
    least: Sequence[tuple[Point, str, ParallelDims]],
    lost: dict[str, str],
    notes: list[str],
    machine: Cluster,
    budget: tuple[float | None, float],
    model: str,
    devices: int,
    base: Config,
) -> Advice:
    """Order the answers, and give the reasons."""
    tokens, limit = budget
    if not answers:
        if not least:
            return Advice([], "no recipe is left to choose from; name some with recipes", (), lost, notes)
        point, name, dims = min(least, key=lambda one: one[0].needed)
        device = machine.device or machine.title
        fewest = make_plan(point.config, dims.size, machine).fewest
        more = f"; it fits on {fewest.parallel_dims.size} of these devices" if fewest else ""
        if way := _native_way(base, machine, dims):
            more += f"; it fits with {way}"
        least_text = f"{point.needed / 2**30:.1f} GiB, {name} with {point.setting.words}"
        return Advice(
            [],
            f"{model} does not fit on {devices} x {device} ({machine.memory}): the least is "
            f"{least_text}{more}; take more devices, or a smaller model",
            (),
            lost,
            notes,
        )
    known = []
    for one in sorted(answers, key=lambda one: (one[0].forecast.gap_percent is None, one[0].score)):
        answer, _, dims = one
        if answer.hours <= limit * 1.000001:
            known.append(one)
        else:
            lost[f"{answer.recipe} {dims.text}".strip()] = _too_long(answer, limit)
    if not known:
        fastest = min((answer for answer, _, _ in answers), key=lambda answer: answer.hours)
        way = "raise the budget, or take a smaller batch"
        if tokens is not None:
            most = human_count(fastest.tokens * limit / fastest.hours)
            way = f"leave out tokens to train on the {most} that fit, or raise the budget"
        return Advice([], f"{_too_long(fastest, limit)}; {way}", (), lost, notes)
    first = known[0][0]
    chosen = [replace(answer, why=_why(answer, first)) for answer, _, _ in known[:FIRST]]
    for answer, _, dims in known[FIRST:]:
        lost[f"{answer.recipe} {dims.text}".strip()] = _why(answer, first)
    changes = _changes(known, first, machine)
    if choose_backend(recipe(first.recipe), machine.facts).name == "emulated":
        way = _native_way(base, machine, known[0][2])
        changes += [f"it fits without emulation with {way}"] if way else []
    return Advice(chosen, None, changes, lost, notes)


def _native_way(base: Config, machine: Cluster, dims: ParallelDims) -> str:
    """What makes a recipe fit that the machine multiplies natively, with its memory; "" if nothing does."""
    room = room_of(base, machine)
    natives = [one for one in recipe_names() if choose_backend(recipe(one), machine.facts).name == "native"]
    with imagine(machine.facts):
        found = fitting(base, lambda m: room.fits(m, dims), machine.facts.is_gpu, dims, natives)
    return "" if found is None else f"{found[0]} ({room.needed(found[1], dims) / 2**30:.1f} GiB)"


def _too_long(answer: Answer, limit: float) -> str:
    """Why an answer is beyond the budget."""
    tokens = f"{human_count(answer.tokens)} tokens"
    return (
        f"{tokens} take {answer.hours:,.3g} hours with {answer.recipe}, and the budget is {limit:,.3g} hours"
    )


def _why(answer: Answer, first: Answer) -> str:
    """The reason of an answer's place."""
    extra = answer.extra_tokens
    if extra is None:
        return f"after those with evidence: {answer.forecast.refused}"
    if answer is first:
        return "fewest device-hours for the loss of bf16"
    name = first.recipe if answer.recipe != first.recipe else f"{first.recipe} {first.layout}"
    return f"{answer.score / first.score:.2f} times the device-hours of {name} for the same loss"


def _changes(
    known: Sequence[tuple[Answer, Point, ParallelDims]], first: Answer, machine: Cluster
) -> list[str]:
    """What would make another recipe the first: tokens that a gap costs, memory, time."""
    found, rivals = [], dict[str, Answer]()
    for other, _, _ in known:
        if other.recipe != first.recipe:
            rivals.setdefault(other.recipe, other)  # in its best layout
    for other in rivals.values():
        extra = other.forecast.extra_tokens_percent
        speed = (other.days / other.tokens) / (first.days / first.tokens)
        least = 100 * ((1 + (first.extra_tokens or 0.0) / 100) / speed - 1)
        most = 100 * ((1 + (other.extra_tokens or 0.0) / 100) * speed - 1)
        if extra is not None and not first.is_reference and most > 0:
            ends = _ends(first.forecast)
            found.append(f"{other.recipe} wins if {first.recipe} needs {most:+.0f} % tokens or more ({ends})")
        elif least > 0 and not other.is_reference:
            ends = _ends(other.forecast)
            found.append(f"{other.recipe} wins if it needs less than {least:+.0f} % tokens ({ends})")
    point = known[0][1]
    chosen, sizes = point.setting, fitting_sizes(point.config.training.batch_size, known[0][2])
    if chosen.recompute or chosen.offload or chosen.micro_batch_size == 1 < max(sizes):
        found.append(f"a device with more than {machine.memory} allows faster settings than {chosen.words}")
    if first.days > 365:
        month = human_count(first.tokens * 30 / first.days)
        found.append(f"it takes {first.days / 365:,.0f} years; 30 days train on {month} tokens")
    return found


def _ends(forecast: Forecast) -> str:
    """The interval of the extra tokens."""
    extra = forecast.extra_tokens_percent
    if extra is None:
        return "nothing is forecast"
    high = f"{extra.high:+.0f} %" if extra.high < 1e4 else "never"
    return f"forecast {extra.low:+.0f} to {high}"


def _answer(
    point: Point,
    name: str,
    dims: ParallelDims,
    line: "_Line",
    budget: tuple[float | None, float],
    price: Price | None,
    forecast: Callable[[float], Forecast],
) -> Answer:
    """The answer of a planned point: its tokens, days and cost, and the lines that train and plan it."""
    t = point.config.training
    per_step = t.batch_size * point.config.data.sequence_length
    tokens, limit = budget
    steps = max(1, math.ceil(tokens / per_step) if tokens else math.floor(limit * 3600 / point.seconds))
    days = steps * point.seconds / 86_400
    train, plan = line.of(name, dims, point, steps)
    return Answer(
        line=train,
        plan_line=plan,
        recipe=name,
        layout=dims.text,
        devices=dims.size,
        setting=point.setting.words,
        memory_gib=point.needed / 2**30,
        tokens=float(steps * per_step),
        days=days,
        cost=None if price is None else days * 24 * dims.size * price.amount,
        currency="" if price is None else price.currency,
        forecast=forecast(float(steps * per_step)),
        why="",
    )


@dataclass(frozen=True)
class _Line:
    """The words that the lines of all answers share."""

    model: str
    cluster: str
    per_node: int
    defaults: Values
    published: Published | None
    data: str | None

    def of(self, name: str, dims: ParallelDims, point: Point, steps: int) -> tuple[str, str]:
        """(the line that trains, the line that plans it)."""
        t = self.defaults["training"]
        words = ["--model", self.model, "--recipe", name, "--steps", str(steps)]
        words += ["--data.sequence_length", str(self.defaults["data"]["sequence_length"])]
        words += ["--training.batch_size", str(t["batch_size"]), *point.setting.options]
        for axis in ("pipeline", "replicate", "shard", "tensor"):
            if (count := getattr(dims, axis)) > 1:
                words += [f"--parallel.{axis}", str(count)]
        if self.published is not None:
            config = published_config(self.model, self.published, steps)
            for section in ("optimizer", "schedule"):
                for key, value in config[section].items():
                    words += [
                        f"--{section}.{key}",
                        f"{value:.4g}" if isinstance(value, float) else f"{value}",
                    ]
        words += [] if self.data is None else ["--data", self.data]
        planned = ["narrowgauge", "plan", *words, "--cluster", self.cluster, "--devices", str(dims.size)]
        return shlex.join([*self.start(dims.size), "train", *words]), shlex.join(planned)

    def start(self, devices: int) -> list[str]:
        """The words that start a verb on some devices; several nodes take a script, as their site needs."""
        nodes, per_node = -(-devices // self.per_node), min(devices, self.per_node)
        if devices == 1:
            return ["narrowgauge"]
        if nodes == 1:
            return ["torchrun", "--standalone", "--nproc-per-node", str(devices), "-m", "narrowgauge"]
        where = ["--torchrun", "--gpus-per-node", str(per_node)]
        if self.cluster in site_names():
            where = ["--slurm", "--site", self.cluster, "--gpus-per-node", str(per_node)]
        return ["narrowgauge", "launch", *where, "--nodes", str(nodes), "--out", "train.sh", "--"]


def _machine(name: str | None) -> tuple[Cluster, str]:
    """The cluster, and its name; without a name that of this machine's device.

    Raises:
        UserError: No file describes this machine.
    """
    if name is not None:
        whole = cluster_name(str(name))
        return load_cluster(whole), whole
    device = choose_device("auto")
    if device.type == "cpu":
        return load_cluster("cpu"), "cpu"
    here = device_name(device)
    for one in cluster_names():
        found = load_cluster(one)
        if found.device and set(found.device.split()) <= set(here.split()):
            return found, one
    raise UserError(
        f"no cluster file describes this machine's {here}; name one with --cluster, one of "
        f"{', '.join(cluster_names())}, or a .toml file of its figures"
    )


def _defaults(
    model: str,
    found: Published | None,
    sequence_length: int | None,
    batch_size: int | None,
    data: str | Path | None,
) -> tuple[Values, list[str]]:
    """The values that all settings share, and where they come from."""
    sized = model_config(name=model)
    if found is None:
        notes = [f"defaults: no training of {model} is published; rate and batch are narrowgauge's"]
        length, batch = min(1024, sized.max_sequence_length), 64
        length, batch = (256, 8) if model in _SMALL else (length, batch)
    else:
        notes = [f"defaults: {found.source}" + (f"; {found.note}" if found.note else "")]
        length, batch = found.sequence_length, found.batch_size
    if data is None:
        notes.append("data: without --data the lines train on the source code of Python's standard library")
    values: Values = {
        "model": {"name": model},
        "data": {"sequence_length": sequence_length or length},
        "training": {"batch_size": batch_size or batch, "device": "cpu"},
        "recipe": {"name": "bf16"},
    }
    make_config(_put(values, micro_batch_size=1))
    return values, notes


def _put(values: Values, **training: int) -> Values:
    """Values with others of the section `training`."""
    return {**values, "training": {**values["training"], **training}}


def _tokens(tokens: float | str | None) -> float | None:
    if tokens is None:
        return None
    if not (number := parse_count(str(tokens))):
        raise UserError(f"--tokens {str(tokens)!r}: it must be a number such as 300B, 1T or 1.5e12")
    return number


def _missing(tokens: float | None, hours: float | None, money: float | None, has_price: bool) -> str | None:
    """What an advice lacks, in a sentence; None if nothing."""
    if money is not None and not has_price:
        return (
            "money needs the price of a device-hour, which this cluster's file lacks; add --price, as 2.50USD"
        )
    if tokens is None and hours is None and money is None:
        return (
            "a budget is missing, and no published training of this model gives one; add --tokens, --hours "
            "or --money"
        )
    return None


def _unfit(name: str, machine: Cluster, is_asked: bool) -> str:
    """Why a recipe is not a candidate on a machine; "" if it is one.

    A machine has one wide recipe: fp16 where it has no bf16, else bf16. The other one and emulated recipes
    are candidates if asked for.
    """
    if is_asked:
        return ""
    backend = choose_backend(recipe(name), machine.facts)
    if backend.name == "emulated":
        return f"emulated on this device: {backend.reason}"
    if name == "fp16" and choose_backend(recipe("bf16"), machine.facts).name == "native":
        return "bf16 is as fast here, and needs no loss scale"
    return ""
