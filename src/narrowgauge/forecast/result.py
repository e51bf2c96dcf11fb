"""Forecasts of several recipes as one result: a table, a picture, JSON, CSV, and pandas if installed."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from narrowgauge.forecast.forecast import Forecast, Forecaster
from narrowgauge.forecast.picture import picture
from narrowgauge.forecast.published import LOSS_LAW
from narrowgauge.system.result import Result, Row, text_table
from narrowgauge.system.t_interval import Interval
from narrowgauge.system.units import human_count


class Forecasts(Result, Sequence[Forecast]):
    """The forecasts of some recipes at one size and length.

    Attributes:
        forecaster: The law that made them.
    """

    def __init__(self, forecasts: Sequence[Forecast], forecaster: Forecaster) -> None:
        """Keep the forecasts with their law."""
        self._forecasts, self.forecaster = tuple(forecasts), forecaster

    def __len__(self) -> int:
        return len(self._forecasts)

    def __iter__(self) -> Iterator[Forecast]:
        return iter(self._forecasts)

    def __getitem__(self, at: Any) -> Any:
        return self._forecasts[at]

    def __repr__(self) -> str:
        shown = (f"{one.recipe} {percent(one.gap_percent)}" for one in self)
        return f"<Forecasts: {', '.join(shown)}>"

    def as_json(self) -> dict[str, Any]:
        """The forecasts and the law for programs."""
        return {
            "forecasts": [one.as_json() for one in self],
            "law": self.forecaster.as_json(),
            "interval": 0.9,
            "loss_law": LOSS_LAW,
        }

    def rows(self) -> list[Row]:
        """A row for each recipe, with the three figures of each interval."""
        rows = []
        for one in self:
            row: Row = {"recipe": one.recipe, "params": one.params, "tokens": one.tokens}
            for name in ("gap_percent", "gap_nats", "extra_tokens_percent", "kappa"):
                interval: Interval | None = getattr(one, name)
                figures = {} if interval is None else interval.as_json()
                row |= {f"{name}_{end}": figures.get(end) for end in ("mean", "low", "high")}
            row |= {"points": one.points, "refused": one.refused, "divergence": one.divergence or None}
            rows.append(row)
        return rows

    def table(self) -> str:
        """The forecasts as text: gap, interval, extra tokens, support."""
        head = ("recipe", "gap", "90 %", "nats", "extra tokens", "90 %", "points", "support")
        lines = [head]
        for one in self:
            if one.gap_percent is None or one.gap_nats is None or one.extra_tokens_percent is None:
                lines.append((one.recipe, "refused", "", "", "", "", "", ""))
                continue
            far = (one.extrapolation.params, one.extrapolation.tokens_per_param)
            beyond = ", ".join(
                f"{factor:.2g}x {name}"
                for factor, name in zip(far, ("size", "length"), strict=True)
                if factor > 1.05
            )
            extra = one.extra_tokens_percent
            lines.append(
                (
                    one.recipe,
                    percent(one.gap_percent),
                    span(one.gap_percent),
                    f"{one.gap_nats.mean:.3f}",
                    _tokens(extra.mean),
                    f"{_tokens(extra.low)} to {_tokens(extra.high)}",
                    f"{one.points}" + (f" ({one.own_points} of it)" if one.own_points else ""),
                    f"beyond: {beyond}" if beyond else "inside",
                )
            )
        text = text_table(lines)
        first = self._forecasts[0]
        title = (
            f"{human_count(first.params)} parameters, {human_count(first.tokens)} tokens, "
            f"{first.tokens / first.params:.3g} tokens per parameter; percent of the loss of a bf16 run"
        )
        notes = [f"{one.recipe}: {note}" for one in self for note in (one.refused, one.divergence) if note]
        return "\n".join((title, text, *notes))

    def explain(self) -> str:
        """The points that support each forecast, and what each published law gives."""
        blocks = []
        for one in self:
            lines = [
                f"{one.recipe}: {one.points} points resemble it, {one.own_points} are of it; the nearest:"
            ]
            lines += [
                f"  {near.gap_percent:+.2f} %  {near.recipe}, {human_count(near.params)} parameters, "
                f"{human_count(near.tokens)} tokens ({near.source}; {near.locator})"
                for near in one.nearest
            ]
            laws = [f"{name} {nats:.3f}" for name, nats in one.published.items() if nats is not None]
            if one.gap_nats is not None and laws:
                lines.append(
                    f"  published laws, nats: {', '.join(laws)}; here {one.gap_nats.mean:.3f} "
                    f"({one.gap_nats.low:.3f} to {one.gap_nats.high:.3f})"
                )
            if one.predicted is not None and one.setting.parts:
                terms = self.forecaster.law.terms(one.setting)
                named = zip(one.setting.parts, terms, strict=True)
                lines.append("  by GEMM: " + ", ".join(f"{part.gemm} {term:.2f} %" for part, term in named))
            if one.kappa is not None:
                lines.append(
                    f"  at 100 M parameters and 10 B tokens: {percent(one.kappa)} ({span(one.kappa)})"
                )
            blocks.append("\n".join(lines))
        law = self.forecaster.as_json()
        exponent = law["exponent"]
        blocks.append(
            f"law: {law['points']} points of {len(law['families'])} families, curves "
            f"{' and '.join(law['curves'])}; gaps of narrow "
            f"forward passes grow as tokens^{exponent['mean']:.3f} ({exponent['low']:.3f} to "
            f"{exponent['high']:.3f}) over "
            f"the points; tokens and nats by {LOSS_LAW}"
        )
        return "\n".join(blocks)

    def plot(self) -> str:
        """An SVG: the gap over tokens per parameter, with its interval and the points that support it."""
        return picture(list(self), self.forecaster)

    def writers(self) -> dict[str, Callable[[], str]]:
        """What `save` writes: as text, the evidence follows the table."""
        return super().writers() | {".txt": lambda: f"{self.table()}\n\n{self.explain()}\n"}


def percent(interval: Interval | None) -> str:
    """The mean of a gap; "refused" for none."""
    return "refused" if interval is None else f"{interval.mean:+.2f} %"


def span(interval: Interval) -> str:
    """Both ends of a gap's interval."""
    return f"{interval.low:+.2f} to {interval.high:+.2f}"


def _tokens(percent: float) -> str:
    """Extra tokens: a percentage, a factor, or that no number of tokens is enough.

    >>> [_tokens(x) for x in (7.2, 250.0, float("inf"), -1e-14)]
    ['+7 %', '3.5x', 'never', '+0 %']
    """
    if percent >= 1e4:
        return "never"
    return f"{round(percent) + 0:+d} %" if percent < 200 else f"{1 + percent / 100:.1f}x"
