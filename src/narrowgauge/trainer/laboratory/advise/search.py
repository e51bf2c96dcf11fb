"""The search behind an advice: each recipe in each layout, with the fastest of its settings that fit.

    micro-batch        16, 8, 4, 2, 1 sequences, of those that divide the batch
    recomputation      none, of the MLP, of whole blocks
    offload            none, of all state
    chunked loss       no, yes

Each step along the first three axes lowers the memory and the speed. So where a setting fits, those beyond it
need no plan. A chunked loss may be faster or slower, and so may more micro-batches of a pipeline, which wait
less: neither rules out another.
"""

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import NamedTuple

from narrowgauge.distributed import ParallelDims
from narrowgauge.forecast import Forecast, Forecaster
from narrowgauge.recipes import choose_backend, recipe, recipe_names
from narrowgauge.system.devices import imagine
from narrowgauge.system.errors import UserError
from narrowgauge.system.units import human_count
from narrowgauge.trainer.cluster.launch.site import site_names
from narrowgauge.trainer.cluster.plan.budget import Price
from narrowgauge.trainer.cluster.plan.cluster_spec import Cluster, cluster_name, cluster_names, load_cluster
from narrowgauge.trainer.cluster.plan.estimate import estimate
from narrowgauge.trainer.cluster.plan.plan import make_plan, room_of
from narrowgauge.trainer.experiment.design import with_keys
from narrowgauge.trainer.laboratory.advise.advise import Advice, Answer
from narrowgauge.trainer.laboratory.arguments import Progress, Values
from narrowgauge.trainer.models import count_block_weights, model_config
from narrowgauge.trainer.models.published import published
from narrowgauge.trainer.runs import choose_device, lay_out
from narrowgauge.trainer.runs.monitor.machine import device_name
from narrowgauge.trainer.simulate import StepEstimate, WholeCount, estimate_step, fitting
from narrowgauge.trainer.simulate.advice import narrower_recipes
from narrowgauge.trainer.training import Config, make_config
from narrowgauge.trainer.training.config.config import fitting_sizes, published_config

RECIPES = ("bf16", "fp16", "fp8", "mxfp8", "nvfp4", "nvfp4-finish", "msamp-o2")
FIRST = 3
MICRO_BATCHES = (16, 8, 4, 2, 1)
RECOMPUTE: tuple[bool | str, ...] = (False, "selective", True)
OFFLOAD = ("", "master,grad,m,v")
_SMALL = ("debug", "gpt2-debug", "ladder-1m", "moe-debug")  # no one published a training of these


class Setting(NamedTuple):
    """One setting of a recipe and a layout."""

    micro_batch_size: int
    recompute: bool | str
    offload: str
    chunked_loss: bool

    @property
    def words(self) -> str:
        """The setting for people."""
        found = [f"micro-batches of {self.micro_batch_size}"]
        if self.recompute:
            found.append(f"{'the MLP is' if self.recompute == 'selective' else 'blocks are'} recomputed")
        found += ["the loss is computed in chunks"] * self.chunked_loss
        return ", ".join([*found, *(["state in the host's memory"] if self.offload else [])])

    @property
    def keys(self) -> dict[str, int | str]:
        """The setting as keys of the configuration."""
        keys = {f"training.{name}": value for name, value in self._asdict().items() if name != "offload"}
        return keys | ({"recipe.offload": self.offload} if self.offload else {})

    def is_beyond(self, other: "Setting") -> bool:
        """Whether it lies further along the axes that lower memory and speed: it is slower."""
        return (
            self.micro_batch_size <= other.micro_batch_size
            and RECOMPUTE.index(self.recompute) >= RECOMPUTE.index(other.recompute)
            and OFFLOAD.index(self.offload) >= OFFLOAD.index(other.offload)
            and self.chunked_loss == other.chunked_loss
        )


class Point(NamedTuple):
    """A setting of a layout that was planned: the bytes that a step needs of a device, whether it has them,
    and the expected seconds of a step, 0 where it was not timed.
    """

    setting: Setting
    dims: ParallelDims
    config: Config
    step: StepEstimate
    needed: int
    fits: bool
    seconds: float = 0.0

    @property
    def words(self) -> str:
        """The memory that it needs, and with what."""
        return f"{self.needed / 2**30:.1f} GiB with {self.setting.words}"


def fastest(values: Values, dims: ParallelDims, cluster: Cluster, counts: dict[Setting, WholeCount]) -> Point:
    """The fastest point of a recipe and a layout that fits, or else the one that needs the least memory.

    `values` are what all settings share, the recipe and the batch among them, which the layout divides;
    `counts` the count of each setting that was timed, which the layouts of a recipe share.
    """
    sizes, chunked = _sizes(values, dims), (False, True)
    offload = OFFLOAD if cluster.facts.is_gpu else OFFLOAD[:1]

    @cache
    def at(setting: Setting) -> Point:
        config = make_config(with_keys(values, setting.keys))
        room = room_of(config, cluster)
        with imagine(cluster.facts):
            step = estimate_step(config, dims)
        needed = room.needed(step.memory, dims)
        return Point(setting, dims, config, step, needed, needed <= room.limit)

    # A single micro-batch adds no gradients, and so may need less than several smaller ones.
    ends = {sizes[-1], sizes[0]} if dims.pipeline == 1 else sizes[::-1]
    narrowest = (Setting(n, RECOMPUTE[-1], offload[-1], chunks) for n in ends for chunks in chunked)
    if not (least := min(map(at, narrowest), key=lambda point: point.needed)).fits:
        return least
    found: list[Point] = []
    for one in product(sizes, RECOMPUTE, offload, chunked):  # none comes before one that it lies beyond
        setting = Setting(*one)
        rivals = [p.setting for p in found if dims.pipeline == 1 or p.setting[0] == setting.micro_batch_size]
        if not any(map(setting.is_beyond, rivals)) and (point := at(setting)).fits:
            time = estimate(point.config, dims, cluster, point.step, counts.get(setting))
            counts[setting] = time.count
            found.append(point._replace(seconds=time.seconds_expected))
    return min(found, key=lambda point: point.seconds)


def _sizes(values: Values, dims: ParallelDims) -> list[int]:
    """The micro-batches with which `train` takes a layout, from the largest; an error if there are none."""
    allowed, found, why = fitting_sizes(values["training"]["batch_size"], dims), list[int](), ""
    for size in (n for n in MICRO_BATCHES if n in allowed):
        config = make_config(with_keys(values, {"training.micro_batch_size": size, **_axes(dims)}))
        try:
            lay_out(config, dims.size)
            found.append(size)
        except UserError as error:  # it divides the model's heads or experts, or a block of the recipe
            why = str(error)
    if not found:
        raise UserError(why)
    return found


def _axes(dims: ParallelDims) -> dict[str, int]:
    """The keys of a layout."""
    axes = {axis: getattr(dims, axis) for axis in ("pipeline", "replicate", "shard", "tensor")}
    return {f"parallel.{axis}": count for axis, count in axes.items() if count > 1}


def layouts(devices: int, per_node: int, heads: int, layers: int) -> list[ParallelDims]:
    """The layouts of some devices.

    Replicas, shards, and shards with tensor parallelism in a node. On several nodes also replicas of a node's
    shards, and pipelines of whole layers with and without the widest tensor parallelism; in one node the
    links are fast, and a pipeline would only add waiting.
    """
    if devices == 1:
        return [ParallelDims()]
    found = [ParallelDims(replicate=devices), ParallelDims(shard=devices)]
    widths = [n for n in (2, 4, 8) if n <= per_node and devices % n == 0 == heads % n]
    found += [ParallelDims(shard=devices // n, tensor=n) for n in widths]
    if devices > per_node:
        if per_node > 1:
            found.append(ParallelDims(replicate=devices // per_node, shard=per_node))
        for stages, width in product((2, 4, 8), (1, *widths[-1:])):
            if layers % stages == 0 == devices % (stages * width):
                found.append(ParallelDims(stages, shard=devices // (stages * width), tensor=width))
    return found


def defaults(model: str, data: str | None, length: int | None, batch: int | None) -> tuple[Values, list[str]]:
    """The values that all settings share, with a length and batch in place of the published ones, and where
    they come from.
    """
    found, sized = published(model), model_config(name=model)
    usual = (256, 8) if model in _SMALL else (min(1024, sized.max_sequence_length), 64)
    notes = [f"defaults: no training of {model} is published; rate and batch are narrowgauge's"]
    if found is not None:
        usual = found.sequence_length, found.batch_size
        notes = [f"defaults: {found.source}" + (f"; {found.note}" if found.note else "")]
    if data is None:
        notes.append("data: without --data the lines train on the source code of Python's standard library")
    values: Values = {
        "model": {"name": model},
        "data": {"sequence_length": length or usual[0]},
        "training": {"batch_size": batch or usual[1], "device": "cpu"},
        "recipe": {"name": "bf16"},
    }
    make_config(with_keys(values, {"training.micro_batch_size": 1}))
    return values, notes


@dataclass(frozen=True)
class Question:
    """What an advice is asked for: the values that all settings share and where they come from (`defaults`),
    some devices of a cluster, the cluster's name in the lines, the tokens (None for those that the hours pay
    for), the most hours, the price of a device-hour, the text; and why each alternative lost, by its name.
    """

    values: Values
    notes: list[str]
    machine: Cluster
    name: str
    devices: int
    tokens: float | None
    limit: float
    price: Price | None
    data: str | None
    lost: dict[str, str] = field(default_factory=dict)

    @property
    def model(self) -> str:
        """The name of the model."""
        return str(self.values["model"]["name"])

    def advice(self, recipes: Sequence[str], show: Progress | None) -> Advice:
        """Search, order the answers, and give the reasons."""
        if not recipes:
            self.lost.update({one: why for one in RECIPES if (why := unfit(one, self.machine))})
        candidates = recipes or [one for one in RECIPES if one not in self.lost]
        answers, least = self._search(candidates, show)
        whole = {"training.micro_batch_size": self.values["training"]["batch_size"]}
        base = make_config(with_keys(self.values, whole))
        if not answers and not recipes:  # then all that may fit, emulated or not
            others = [one for one in narrower_recipes(base) if one not in candidates]
            answers, more = self._search(others, show)
            least += more
        answers.sort(key=lambda one: (one.forecast.gap_percent is None, one.score))
        known = [one for one in answers if one.hours <= self.limit * 1.000001]
        self.lost.update({one.label: self._too_long(one) for one in answers if one not in known})
        if not known:
            return Advice([], self._refusal(answers, least, base), lost=self.lost, notes=self.notes)
        first = known[0]
        self.lost.update({one.label: _why(one, first) for one in known[FIRST:]})
        changes = self._changes(known)
        if choose_backend(recipe(first.recipe), self.machine.facts).name == "emulated":
            way = self._native_way(base, first.point.dims)
            changes += [f"it fits without emulation with {way}"] if way else []
        chosen = [replace(one, why=_why(one, first)) for one in known[:FIRST]]
        return Advice(chosen, None, changes, self.lost, self.notes)

    def _search(self, candidates: Sequence[str], show: Progress | None) -> tuple[list[Answer], list[Point]]:
        """The best answer of each recipe and layout, and the least memory where none fits; fills `lost`."""
        answers, least = list[Answer](), list[Point]()
        sized, counts = model_config(name=self.model), dict[str, dict[Setting, WholeCount]]()
        size, forecaster = count_block_weights(sized), Forecaster()
        batch = self.values["training"]["batch_size"]
        per_step = batch * self.values["data"]["sequence_length"]
        shapes = layouts(self.devices, self.machine.devices_per_node, sized.heads, sized.layers)
        every = list(product(candidates, shapes))
        for number, (name, dims) in enumerate(every, start=1):
            label, values = f"{name} {dims.text}".strip(), {**self.values, "recipe": {"name": name}}
            if not fitting_sizes(batch, dims):
                stages = f"in {dims.pipeline} stages"
                self.lost[label] = f"{dims.data} processes cannot share a batch of {batch} {stages}"
                continue
            if show is not None:
                show(label, number, len(every))
            try:
                best = fastest(values, dims, self.machine, counts.setdefault(name, {}))
            except UserError as error:  # the model or the recipe does not allow this layout
                self.lost[label] = str(error)
                continue
            if not best.fits:
                least.append(best)
                self.lost[label] = f"does not fit: {best.words}"
                continue
            paid = math.floor(self.limit * 3600 / best.seconds) if self.tokens is None else 0
            steps = max(1, paid if self.tokens is None else math.ceil(self.tokens / per_step))
            tokens, days = float(steps * per_step), steps * best.seconds / 86_400
            forecast = forecaster.forecast(recipe(name), size, tokens, name)
            needed = best.needed / 2**30
            lines = self._lines(best, steps)
            answers.append(Answer(*lines, best, name, dims.text, needed, tokens, days, self.price, forecast))
        return answers, least

    def _lines(self, point: Point, steps: int) -> tuple[str, str]:
        """(the line that trains, the line that plans it)."""
        dims, words = point.dims, ["--model", self.model, "--recipe", point.config.recipe.name]
        words += ["--steps", str(steps)]
        shared = {"data.sequence_length": self.values["data"]["sequence_length"]}
        batch = {"training.batch_size": self.values["training"]["batch_size"]}
        shared |= {**batch, **point.setting.keys, **_axes(dims)}
        if (found := published(self.model)) is not None:
            config = published_config(self.model, found, steps)
            for section in ("optimizer", "schedule"):
                for key, value in config[section].items():
                    shared[f"{section}.{key}"] = f"{value:.4g}" if isinstance(value, float) else value
        for key, value in shared.items():
            words += [f"--{key}", str(value).lower()] if value is not False else []
        words += [] if self.data is None else ["--data", self.data]
        planned = ["narrowgauge", "plan", *words, "--cluster", self.name, "--devices", str(dims.size)]
        return shlex.join([*self._start(dims.size), "train", *words]), shlex.join(planned)

    def _start(self, devices: int) -> list[str]:
        """The words that start a verb on some devices; several nodes take a script, as their site needs."""
        nodes = -(-devices // self.machine.devices_per_node)
        if devices == 1:
            return ["narrowgauge"]
        if nodes == 1:
            return ["torchrun", "--standalone", "--nproc-per-node", str(devices), "-m", "narrowgauge"]
        site = ["--slurm", "--site", self.name] if self.name in site_names() else ["--torchrun"]
        where = [*site, "--gpus-per-node", str(self.machine.devices_per_node)]
        return ["narrowgauge", "launch", *where, "--nodes", str(nodes), "--out", "train.sh", "--"]

    def _refusal(self, answers: Sequence[Answer], least: Sequence[Point], base: Config) -> str:
        """Why no answer is within the budget, or no point within the memory; and the ways out."""
        if answers:
            best, way = min(answers, key=lambda one: one.hours), "raise the budget, or take a smaller batch"
            if self.tokens is not None:
                most = human_count(best.tokens * self.limit / best.hours)
                way = f"leave out tokens to train on the {most} that fit, or raise the budget"
            return f"{self._too_long(best)}; {way}"
        if not least:
            return "no recipe is left to choose from; name some with recipes"
        point = min(least, key=lambda one: one.needed)
        words = f"{point.config.recipe.name} with {point.setting.words}"
        fewest = make_plan(point.config, point.dims.size, self.machine).fewest
        more = f"; it fits on {fewest.parallel_dims.size} of these devices" if fewest else ""
        if way := self._native_way(base, point.dims):
            more += f"; it fits with {way}"
        device = self.machine.device or self.machine.title
        return (
            f"{self.model} does not fit on {self.devices} x {device} ({self.machine.memory}): the least is "
            f"{point.needed / 2**30:.1f} GiB, {words}{more}; take more devices, or a smaller model"
        )

    def _native_way(self, base: Config, dims: ParallelDims) -> str:
        """What makes a recipe fit that the machine multiplies natively, with its memory; "" if nothing."""
        room, facts = room_of(base, self.machine), self.machine.facts
        natives = [one for one in recipe_names() if choose_backend(recipe(one), facts).name == "native"]
        with imagine(facts):
            found = fitting(base, lambda m: room.fits(m, dims), facts.is_gpu, dims, natives)
        return "" if found is None else f"{found[0]} ({room.needed(found[1], dims) / 2**30:.1f} GiB)"

    def _too_long(self, one: Answer) -> str:
        """Why an answer is beyond the budget."""
        taken = f"{human_count(one.tokens)} tokens take {one.hours:,.3g} hours with {one.recipe}"
        return f"{taken}, and the budget is {self.limit:,.3g} hours"

    def _changes(self, known: Sequence[Answer]) -> list[str]:
        """What would make another recipe the first: tokens that a gap costs, memory, time."""
        first, found, rivals = known[0], list[str](), dict[str, Answer]()
        for other in known[1:]:
            if other.recipe != first.recipe:
                rivals.setdefault(other.recipe, other)  # in its best layout
        for other in rivals.values():
            speed = (other.days / other.tokens) / (first.days / first.tokens)
            least = 100 * ((1 + (first.extra_tokens or 0.0) / 100) / speed - 1)
            most = 100 * ((1 + (other.extra_tokens or 0.0) / 100) * speed - 1)
            if other.extra_tokens is not None and not first.is_reference and most > 0:
                needs = f"{first.recipe} needs {most:+.0f} % tokens or more ({_ends(first.forecast)})"
                found.append(f"{other.recipe} wins if {needs}")
            elif least > 0 and not other.is_reference:
                needs = f"it needs less than {least:+.0f} % tokens ({_ends(other.forecast)})"
                found.append(f"{other.recipe} wins if {needs}")
        chosen = first.point.setting
        sizes = fitting_sizes(first.point.config.training.batch_size, first.point.dims)
        if chosen.recompute or chosen.offload or chosen.micro_batch_size == 1 < max(sizes):
            memory = self.machine.memory
            found.append(f"a device with more than {memory} allows faster settings than {chosen.words}")
        if first.days > 365:
            month = human_count(first.tokens * 30 / first.days)
            found.append(f"it takes {first.days / 365:,.0f} years; 30 days train on {month} tokens")
        return found


def _why(answer: Answer, first: Answer) -> str:
    """The reason of an answer's place."""
    if answer.extra_tokens is None:
        return f"after those with evidence: {answer.forecast.refused}"
    if answer is first:
        return "fewest device-hours for the loss of bf16"
    name = first.recipe if answer.recipe != first.recipe else f"{first.recipe} {first.layout}"
    return f"{answer.score / first.score:.2f} times the device-hours of {name} for the same loss"


def _ends(forecast: Forecast) -> str:
    """The interval of the extra tokens."""
    extra = forecast.extra_tokens_percent
    if extra is None:
        return "nothing is forecast"
    high = f"{extra.high:+.0f} %" if extra.high < 1e4 else "never"
    return f"forecast {extra.low:+.0f} to {high}"


def machine_of(name: str | None) -> tuple[Cluster, str]:
    """The cluster, and its name; without a name that of this machine's device."""
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


def unfit(name: str, machine: Cluster) -> str:
    """Why a recipe is not a candidate on a machine, unless it is asked for; "" if it is one.

    A machine has one wide recipe: fp16 where it has no bf16, else bf16.
    """
    backend = choose_backend(recipe(name), machine.facts)
    if backend.name == "emulated":
        return f"emulated on this device: {backend.reason}"
    if name == "fp16" and choose_backend(recipe("bf16"), machine.facts).name == "native":
        return "bf16 is as fast here, and needs no loss scale"
    return ""
