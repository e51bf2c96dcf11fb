"""An advice: the first lines, what would change them, and why each alternative lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from narrowgauge.system.result import Result, Row, text_table
from narrowgauge.system.units import human_count, human_duration
from narrowgauge.trainer.laboratory.chart import bars

if TYPE_CHECKING:
    from narrowgauge.forecast import Forecast
    from narrowgauge.trainer.cluster.plan.budget import Price
    from narrowgauge.trainer.laboratory.advise.search import Point


@dataclass(frozen=True)
class Answer:
    """One line that trains, and what it takes.

    Attributes:
        line: The command that trains.
        plan_line: The command that plans it.
        point: The recipe, layout and settings, and the memory and the time of a step.
        steps: The steps that the line trains.
        price: The price of a device-hour; None without one.
        forecast: The forecast of the loss gap.
        why: The reason of its place.
    """

    line: str
    plan_line: str
    point: Point
    steps: int
    price: Price | None
    forecast: Forecast
    why: str = ""

    @property
    def recipe(self) -> str:
        """The name of the recipe."""
        return self.point.config.recipe.name

    @property
    def layout(self) -> str:
        """The parallel layout in words; "" for one device."""
        return self.point.dims.text

    @property
    def label(self) -> str:
        """Recipe and layout."""
        return f"{self.recipe} {self.layout}".strip()

    @property
    def memory_gib(self) -> float:
        """GiB that a step needs of a device."""
        return self.point.needed / 2**30

    @property
    def cost(self) -> float | None:
        """The price of all its tokens; None without one."""
        return None if self.price is None else self.device_hours * self.price.amount

    @property
    def tokens(self) -> float:
        """Tokens that the line trains on."""
        return float(self.steps * self.point.config.tokens_per_step)

    @property
    def days(self) -> float:
        """Days of all its tokens, as expected."""
        return self.steps * self.point.seconds / 86_400

    @property
    def hours(self) -> float:
        """Hours of all its tokens, as expected."""
        return 24 * self.days

    @property
    def device_hours(self) -> float:
        """Hours of all its tokens, times the devices."""
        return self.hours * self.point.dims.size

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


_HEAD = ("", "recipe", "layout", "GiB", "tokens", "time", "cost", "gap", "90 %", "extra tokens", "points")


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
