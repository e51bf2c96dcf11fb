"""`advise`: from a machine, a model and a budget to the line that trains best.

An advice has the first lines, what would change them, and why each alternative lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from narrowgauge.system.errors import UserError, require
from narrowgauge.system.result import Result, Row, text_table
from narrowgauge.system.units import human_count, human_duration
from narrowgauge.trainer.cluster.plan.budget import parse_price, tokens_of
from narrowgauge.trainer.cluster.plan.cluster_spec import cluster_name, cluster_names
from narrowgauge.trainer.laboratory import arguments as given
from narrowgauge.trainer.laboratory.arguments import Form
from narrowgauge.trainer.laboratory.chart import bars
from narrowgauge.trainer.models.published import published

if TYPE_CHECKING:
    from narrowgauge.forecast import Forecast
    from narrowgauge.trainer.cluster.plan.budget import Price
    from narrowgauge.trainer.laboratory.advise.search import Point

_CLUSTERS = f"{', '.join(cluster_names())}, or a .toml file (this machine)"
_HEAD = ("", "recipe", "layout", "GiB", "tokens", "time", "cost", "gap", "90 %", "extra tokens", "points")


@dataclass(frozen=True)
class Answer:
    """One line that trains, and what it takes.

    Attributes:
        line: The command that trains.
        plan_line: The command that plans it.
        point: The layout and settings, and the memory and the time of a step.
        recipe: The name of the recipe.
        layout: The parallel layout in words; "" for one device.
        memory_gib: GiB that a step needs of a device.
        tokens: Tokens that the line trains on.
        days: Days of all its tokens, as expected.
        price: The price of a device-hour; None without one.
        forecast: The forecast of the loss gap.
        why: The reason of its place.
    """

    line: str
    plan_line: str
    point: Point
    recipe: str
    layout: str
    memory_gib: float
    tokens: float
    days: float
    price: Price | None
    forecast: Forecast
    why: str = ""

    @property
    def label(self) -> str:
        """Recipe and layout."""
        return f"{self.recipe} {self.layout}".strip()

    @property
    def hours(self) -> float:
        """Hours of all its tokens, as expected."""
        return 24 * self.days

    @property
    def device_hours(self) -> float:
        """Hours of all its tokens, times the devices."""
        return self.hours * self.point.dims.size

    @property
    def cost(self) -> float | None:
        """The price of all its tokens; None without one."""
        return None if self.price is None else self.device_hours * self.price.amount

    @property
    def extra_tokens(self) -> float | None:
        """Percent more tokens for the loss of bf16; None where nothing is forecast."""
        extra = self.forecast.extra_tokens_percent
        return None if extra is None else extra.mean

    @property
    def is_reference(self) -> bool:
        """Whether the recipe is the one that gaps are measured against: it has none, whatever happens."""
        gap = self.forecast.gap_percent
        return gap is not None and gap.low == gap.high == 0.0

    @property
    def score(self) -> float:
        """Days a token for the loss of bf16; a gap counts by the tokens that buy it back."""
        return self.days * (1 + (self.extra_tokens or 0.0) / 100) / self.tokens

    def as_row(self) -> Row:
        """The answer as values."""
        gap = self.forecast.gap_percent
        names = ("recipe", "line", "layout", "memory_gib", "tokens", "days", "device_hours", "cost")
        return {
            **{name: getattr(self, name) for name in names},
            "currency": self.price.currency if self.price else "",
            "gap_percent": None if gap is None else gap.as_json(),
            "extra_tokens_percent": self.extra_tokens,
            "evidence": self.forecast.points,
            "why": self.why,
        }


@dataclass(eq=False)
class Advice(Result):
    """The answers in their order, or the sentence that refuses them.

    Attributes:
        answers: At most three, the best first.
        refused: Why there is none; None if there is one.
        changes: What would change the first answer.
        lost: Why each alternative lost, by its name.
        notes: Where the defaults come from.
    """

    answers: list[Answer]
    refused: str | None
    changes: Sequence[str] = ()
    lost: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def has_failed(self) -> bool:
        """Whether no setting fits the question."""
        return not self.answers

    def __repr__(self) -> str:
        if not self.answers:
            return f"<Advice refused: {self.refused}>"[:190]
        first = self.answers[0]
        return f"<Advice: {first.recipe}, {first.memory_gib:.1f} GiB, {first.days:.3g} days>"

    def rows(self) -> list[Row]:
        """A row for each answer."""
        return [answer.as_row() for answer in self.answers]

    def as_json(self) -> dict[str, Any]:
        """The answers, or the refusal, and the reasons."""
        reasons = {name: getattr(self, name) for name in ("refused", "changes", "lost", "notes")}
        return {"answers": self.rows(), **reasons}

    def table(self) -> str:
        """The answers, their lines, and the reasons."""
        parts = [f"refused: {self.refused}"] if self.refused else []
        if self.answers:
            parts.append(text_table([_HEAD, *(_cells(n, a) for n, a in enumerate(self.answers, 1))]))
        for number, answer in enumerate(self.answers, start=1):
            parts.append(
                f"{number}. {answer.recipe}: {answer.why}; {answer.point.setting.words}\n   {answer.line}"
            )
        if self.changes:
            parts += ["what would change the answer:", *(f"  {text}" for text in self.changes)]
        if self.lost:
            parts += ["why the others lost:", *_reasons(self.lost)]
        return "\n".join([*parts, *self.notes])

    def plot(self) -> str:
        """The days of each answer."""
        days = {answer.label: (answer.days,) * 3 for answer in self.answers}
        return bars(days, "days of training")


def advise(
    model: given.NamedModel,
    cluster: Annotated[str | None, Form("SPEC", cluster_name), _CLUSTERS] = None,
    tokens: Annotated[str | float | None, Form("D")] = None,
    *,
    hours: Annotated[float | None, Form("H")] = None,
    money: Annotated[float | None, Form("M")] = None,
    devices: given.Count = 1,
    recipes: Annotated[Sequence[str], given.NAMES] = (),
    price: Annotated[str | None, Form("P")] = None,
    sequence_length: given.Count | None = None,
    batch_size: given.Count | None = None,
    data: given.Source | Path | None = None,
    show: given.Progress | None = None,
) -> Advice:
    """Find the best recipe, layout and settings for a machine and a budget.

        narrowgauge advise --model gpt2-124m --cluster rtx4090
        narrowgauge advise --model llama3-8b --cluster b200 --devices 8 --tokens 100B

    The best takes the fewest device-hours for the loss that bf16 reaches: days by `plan`, times the tokens
    that buy the gap of `predict` back.

    Args:
        model: A named model (narrowgauge models).
        cluster: A shipped cluster, or a .toml file; None for this machine.
        tokens: Tokens to train on, as in 10B (as published, or those that hours or money pay for).
        hours: The most hours of the training.
        money: The most money, in the currency of the price.
        devices: Devices in all.
        recipes: Recipes to choose from (those that the machine multiplies natively).
        price: The price of a device-hour, as in 2.50USD (the cluster's).
        sequence_length: Tokens of a sequence (as published).
        batch_size: Sequences of a step (as published).
        data: The text or corpus that the lines name.
        show: Called with the name of each recipe and layout, their number so far and in all.

    Returns:
        At most three answers; `refused` holds the reason if there is none.

    Raises:
        UserError: A name or value is wrong.
    """
    from narrowgauge.trainer.laboratory.advise.search import Question, defaults, machine_of

    require("recipes", recipes, Iterable)
    machine, name = machine_of(cluster)
    for option, value in (("hours", hours), ("money", money), ("devices", devices)):
        if value is not None and not (isinstance(value, int | float) and 0 < value < math.inf):
            raise UserError(f"{option} = {value!r}: it must be above 0")
    if devices > (whole := machine.devices_per_node) and devices % whole:
        raise UserError(
            f"devices = {devices}: a node of this cluster has {whole}, and a run takes whole nodes; take "
            f"{devices // whole * whole}"
        )
    hour = parse_price("--price", str(price)) if price else machine.price
    limit, refused = hours or math.inf, ""
    if money is not None and hour is None:
        refused = "money needs the price of a device-hour, which this cluster's file lacks; add --price, as "
        refused += "2.50USD"
    elif money is not None and hour is not None:
        limit = min(limit, money / hour.amount / devices)
    budget: float | None = None if tokens is None else tokens_of(str(tokens))
    if (found := published(model)) and budget is None and hours is None and money is None:
        budget = found.tokens
    if budget is None and limit == math.inf and not refused:
        refused = "a budget is missing, and no published training of this model gives one; add --tokens, "
        refused += "--hours or --money"
    text = None if data is None else str(data)
    values, notes = defaults(model, text, sequence_length, batch_size)
    if refused:
        return Advice([], refused, notes=notes)
    question = Question(values, notes, machine, name, devices, budget, limit, hour, text)
    return question.advice(recipes, show)


def _cells(number: int, a: Answer) -> tuple[str, ...]:
    return (
        f"{number}",
        a.recipe,
        a.layout or "one device",
        f"{a.memory_gib:.1f}",
        human_count(a.tokens),
        human_duration(86_400 * a.days),
        f"{a.cost:,.2f} {a.price.currency}".strip() if a.price else f"{a.device_hours:,.0f} device-hours",
        *_evidence(a),
    )


def _reasons(lost: Mapping[str, str]) -> Iterator[str]:
    """A line for each reason, with all alternatives that it holds for: recipes, and layouts of one recipe."""
    shared: dict[str, dict[str, list[str]]] = {}
    for label, why in lost.items():
        name, _, layout = label.partition(" ")
        shared.setdefault(why, {}).setdefault(name, []).append(layout)
    for why, layouts in shared.items():
        names = (f"{name} {', '.join(found)}".strip() for name, found in layouts.items())
        yield f"  {'; '.join(names)}: {why}"


def _evidence(a: Answer) -> tuple[str, str, str, str]:
    """The gap, its interval, the tokens that buy it back, and the points behind them."""
    gap, extra = a.forecast.gap_percent, a.extra_tokens
    if gap is None:
        return "not known", "", "", ""
    if a.is_reference:
        return "reference", "", "", ""
    tokens = "" if extra is None else f"{extra:+.0f} %" if extra < 1e4 else "never"
    return f"{gap.mean:+.2f} %", f"{gap.low:+.2f} to {gap.high:+.2f}", tokens, f"{a.forecast.points}"
