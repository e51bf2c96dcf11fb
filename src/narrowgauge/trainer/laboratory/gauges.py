"""Gauges in any training loop: what the casts of a converted model do to its tensors, step by step.

    with ng.gauges(model) as gauges:
        for batch in batches:
            loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    print(gauges.map())
    gauges.report("gauges.html")

A step ends when an optimizer of torch's (or ours) updates a parameter of the model; no call is needed. Each
place is read once a step, in the first micro-batch (`nn.gauges`). Reading changes no value.

Torch calls a hook before and after each step of any optimizer, but only inside the block. The hook before is
necessary: it reads a gradient that the step may drop, separates the update's write to a weight from writes
of the loop, and finds the moments of an optimizer that is known only when it steps.

Entries go to reporters of others, as functions of a step and its values: W&B, trackio, TensorBoard, MLflow,
Lightning. The method that a program has identifies it, so none of them is imported here, and any object with
the same method works. A reporter that fails stops the loop with its own error: the caller opened it, and
knows why.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from narrowgauge.nn import Gauges
from narrowgauge.nn.gauges import LayerGauge, means
from narrowgauge.nn.operands import Observation
from narrowgauge.nn.step_state import stepped_modules
from narrowgauge.recipes.places import GAUGED_PLACES
from narrowgauge.system.errors import UserError, checked
from narrowgauge.system.result import Result, Row, text_table, write_result
from narrowgauge.trainer.laboratory.chart import heat

Values = Mapping[str, float]
Report = Callable[[int, Values], object]


def reporter(given: Any) -> Report:
    """A function that sends the values of a step to what a program's own logging calls take.

    Args:
        given: A `SummaryWriter`; a W&B run, or the module `wandb`; `trackio`; `mlflow`; a logger of
            Lightning; or any function of a step and a dictionary.
    """
    if callable(getattr(given, "add_scalar", None)):  # TensorBoard
        return lambda step, values: [given.add_scalar(name, x, step) for name, x in values.items()]
    if callable(getattr(given, "log_metrics", None)):  # MLflow, Lightning
        return lambda step, values: given.log_metrics(dict(values), step=step)
    if callable(getattr(given, "log", None)):
        module = getattr(given, "__name__", "") or type(given).__module__
        if str(module).startswith("wandb"):  # joins the loop's own next call, whatever its count of steps is
            return lambda step, values: given.log({**values, "narrowgauge/step": step}, commit=False)
        return lambda step, values: given.log(dict(values), step=step)
    if callable(given):
        return lambda step, values: given(step, dict(values))
    raise UserError(
        f"{given!r} is not a reporter: it needs log (W&B, trackio), add_scalar (TensorBoard), log_metrics "
        "(MLflow, Lightning), or be a function of a step and a dictionary"
    )


#: A custom gauge: from a tensor as it came, and the values that the GEMM sees, to a number.
Figure = Callable[[torch.Tensor, torch.Tensor], float]
_FIGURES = ("underflow", "zeros", "largest", "clipped", "nonfinite", "mean_error", "rms", "cosine")


@dataclass(frozen=True)
class Reading:
    """One place of one layer in one step.

    Attributes:
        step: The optimizer step, from 1.
        layer: The name of the layer.
        place: The place, such as "fprop.x"; "fprop.y", "dgrad.dx" and "wgrad.dw" are results of GEMMs.
        cast: The name of the cast; None for a result.
        snr_db: Signal to quantization noise in decibels; None where nothing was lost.
        figures: The other figures by name: shares of the elements, and the figures of custom gauges.
    """

    step: int
    layer: str
    place: str
    cast: str | None
    snr_db: float | None
    figures: Mapping[str, float | None]

    def as_row(self) -> Row:
        """The reading as a flat dictionary."""
        facts = {name: value for name, value in vars(self).items() if name != "figures"}
        return {**facts, **self.figures}

    def __getitem__(self, key: str) -> Any:
        return self.as_row()[key]


class GaugeMap(Result, tuple[Reading, ...]):
    """The readings of one step, by layer and place, in the order of the model's layers."""

    def __repr__(self) -> str:
        known = [r for r in self if r.snr_db is not None]
        if not known:
            return f"<GaugeMap: {len(self)} readings, no noise>"
        worst = min(known, key=lambda r: r.snr_db or 0.0)
        return f"<GaugeMap of step {worst.step}: worst {worst.layer} {worst.place}, {worst.snr_db:.2f} dB>"

    def rows(self) -> list[Row]:
        """A row for each layer and place."""
        return [reading.as_row() for reading in self]

    def as_json(self) -> dict[str, Any]:
        """The readings."""
        return {"readings": self.rows()}

    def _cells(self) -> tuple[list[str], list[str], dict[tuple[str, str], float]]:
        values = {(r.layer, r.place): r.snr_db for r in self if r.snr_db is not None}
        layers = list(dict.fromkeys(layer for layer, _ in values))
        return layers, [place for place in GAUGED_PLACES if place in {p for _, p in values}], values

    def table(self) -> str:
        """Decibels of signal to quantization noise by layer and place; empty where nothing was lost."""
        layers, places, values = self._cells()
        shown = {key: f"{decibels:.2f}" for key, decibels in values.items()}
        lines = [(layer, *(shown.get((layer, place), "") for place in places)) for layer in layers]
        note = "signal to quantization noise, dB; at 20 dB the noise is a tenth of the values"
        return f"{text_table([('layer', *places), *lines])}\n{note}"

    def plot(self) -> str:
        """The map as a picture: the darker, the less noise."""
        return heat(*self._cells(), "signal to quantization noise, dB", ".1f")


class GaugeSession:
    """Gauges that are attached to a model between `with` and the end of its block."""

    def __init__(
        self, model: torch.nn.Module, every: int, own: Mapping[str, Figure], to: Sequence[object]
    ) -> None:
        """Find the layers under a recipe; nothing is attached yet."""
        self.model, self.every, self.own = model, every, dict(own)
        self._reports = [reporter(one) for one in to]
        if not stepped_modules(model):
            raise UserError(
                f"{type(model).__name__} has no layer under a recipe, and gauges read what casts do; put it "
                "under one first: ng.convert(model, 'mxfp8')"
            )
        if every < 1:
            raise UserError(f"every = {every} must be a number of steps from 1 on")
        self._lines: dict[int, list[dict[str, Any]]] = {}  # of each step that was read, as `Gauges` has them
        self._step, self._reader = 1, None if every > 1 else Gauges.of(self.model)
        self._own_figures: dict[tuple[str, str], dict[str, float]] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> "GaugeSession":
        self._handles = [
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._after_update),
        ]
        self._attach()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        if (reader := self._reader) is not None:
            reader.begin_micro_batch(is_first=False, is_last=False)
            if kind is None and reader.vectors:  # passes without an update are a reading as well
                self._keep(reader)
        self._reader = None

    @property
    def readings(self) -> dict[int, list[Reading]]:
        """The readings of each step that was read, by its number."""
        return {step: self._read(step) for step in self._lines}

    def map(self, step: int | None = None) -> GaugeMap:
        """The readings of a step; None for the last that was read.

        Raises:
            UserError: Nothing was read, or not in this step.
        """
        if not self._lines:
            raise UserError("nothing was read: no pass of the model was computed inside the with block")
        if step is not None and step not in self._lines:
            raise UserError(f"step {step} was not read; those that were: {', '.join(map(str, self._lines))}")
        return GaugeMap(self._read(max(self._lines) if step is None else step))

    def entries(self, prefix: str = "narrowgauge/") -> dict[str, float]:
        """The means over layers of the last readings by place, for `wandb.log` and other reporters."""
        return means(self._lines[max(self._lines)] if self._lines else [], prefix)

    def report(self, path: str | Path) -> Path:
        """Write a page with the map of every step that was read, and return its path.

        Raises:
            UserError: Nothing was read, or the file cannot be written.
        """
        from narrowgauge.trainer.report import Run, render_report  # here: gauges need no template engine

        self.map()
        path = Path(path)
        run = Run(path.stem, path, status="done", gauges=[*chain.from_iterable(self._lines.values())])
        return write_result(path, render_report([run]))

    def _attach(self) -> None:
        if (reader := self._reader) is None:
            return
        reader.begin_micro_batch(is_first=True, is_last=True)
        self._own_figures = {}
        if self.own:
            for name, layer in reader.layers.items():
                layer.observer = _WithOwn(name, reader, self.own, self._own_figures)

    def _is_of_model(self, optimizer: torch.optim.Optimizer) -> bool:
        own = {id(p) for p in self.model.parameters()}
        return any(id(p) in own for group in optimizer.param_groups for p in group["params"])

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._reader is None or not self._is_of_model(optimizer):
            return
        self._reader.state |= Gauges.of(self.model, optimizer).state  # its moments are known only now
        self._reader.after_backward()

    def _after_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._is_of_model(optimizer):
            return
        if self._reader is not None:
            self._reader.after_step()
            self._keep(self._reader)
        self._step += 1
        self._reader = None if self._step % self.every else Gauges.of(self.model)
        self._attach()

    def _keep(self, reader: Gauges) -> None:
        """Fetch the readings of a step."""
        own = self._own_figures
        lines = [line | own.get((line["layer"], line["place"]), {}) for line in reader.lines(self._step)]
        self._lines[self._step] = lines
        for report in self._reports:
            report(self._step, self.entries())

    def _read(self, step: int) -> list[Reading]:
        names = (*_FIGURES, *self.own)
        return [
            Reading(
                *(line["step"], line["layer"], line["place"], line["cast"], line.get("sqnr_db")),
                {name: line.get(name) for name in names},
            )
            for line in self._lines[step]
        ]


@dataclass(frozen=True)
class _WithOwn(LayerGauge):
    """An observer that also computes custom gauges, once for each place."""

    own: Mapping[str, Figure]
    found: dict[tuple[str, str], dict[str, float]]

    def operand(self, observation: Observation) -> None:
        super().operand(observation)
        key = (self.layer, observation.place)
        if key not in self.found:
            x, seen = observation.x.detach().float(), observation.values.detach().float()
            self.found[key] = {name: float(figure(x, seen)) for name, figure in self.own.items()}


@checked
def gauges(
    model: torch.nn.Module, every: int = 1, own: Mapping[str, Figure] | None = None, to: object = ()
) -> GaugeSession:
    """Attach gauges to a converted model for a `with` block, in a loop of any shape.

    Args:
        model: A model that `convert` has changed.
        every: Steps between readings; the first is step `every`.
        own: Custom gauges by name: functions of an operand as it came and as the GEMM sees it (after a
            Hadamard transform in its coordinates), both float32 matrices, that return a number.
        to: A reporter, or a sequence of some, that gets the `entries` of each step that was read: a W&B run,
            `trackio`, a `SummaryWriter`, `mlflow`, a logger of Lightning, or a function of a step and a
            dictionary.

    Returns:
        The session, for `with ng.gauges(model) as g:`; then `g.map()`, `g.report("x.html")` and
        `g.entries()`.

    Raises:
        UserError: No layer of the model is under a recipe, or `to` is not a reporter.
    """
    return GaugeSession(model, every, own or {}, to if isinstance(to, list | tuple) else (to,))
