"""`plan`: what a run will take on a cluster or on this machine, before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from narrowgauge.recipes import RecipeLike
from narrowgauge.system.errors import UserError, checked
from narrowgauge.system.result import Result, Row
from narrowgauge.trainer.cluster.plan.budget import parse_price, tokens_of
from narrowgauge.trainer.cluster.plan.cluster_spec import cluster_name, cluster_names, load_cluster
from narrowgauge.trainer.laboratory import arguments as given
from narrowgauge.trainer.laboratory.arguments import Form, Section, config_of, values_of
from narrowgauge.trainer.laboratory.chart import bars

if TYPE_CHECKING:
    from rich.console import Console

    from narrowgauge.trainer.cluster.plan.budget import Price
    from narrowgauge.trainer.cluster.plan.plan import Breakeven, Plan

_CLUSTERS = f"{', '.join(cluster_names())}, or a .toml file"


@dataclass(eq=False)
class PlanResult(Result):
    """A plan: memory by class, traffic, time and cost.

    Attributes:
        plan: The plan.
        tokens: The tokens to train on; 0 for as many as `training.steps` take.
        price: The price of a device-hour that was given.
        gap: Whether the recipe's speed pays for the tokens that buy its loss back; None if not asked.
        words: The command line that the printed line of a change begins with.
        note: Where the values come from that were not given; "" if that is the default of each key.
    """

    plan: Plan
    tokens: int
    price: Price | None
    gap: Breakeven | None
    words: Sequence[str] = ("plan",)
    note: str = ""

    @property
    def fits(self) -> bool:
        """Whether a step fits into the memory of a device."""
        return self.plan.fits

    @property
    def memory_gib(self) -> float:
        """The memory that a step needs of a device, in GiB."""
        return self.plan.needed / 2**30

    @property
    def days(self) -> float | None:
        """Days of the budget: as expected, else at best; None without a cluster."""
        return self._of_budget("days")

    @property
    def cost(self) -> float | None:
        """The price of the budget, in the price's currency; None without a cluster or a price."""
        return self._of_budget("price") or None

    def _of_budget(self, name: str) -> float | None:
        found = self.as_json()
        return (found.get("expect") or found.get("run") or {}).get(name)

    def __repr__(self) -> str:
        fits = "fits" if self.fits else "does not fit"
        days = "" if self.days is None else f", {self.days:.3g} days"
        name, recipe = self.plan.config.model.name, self.plan.config.spec.recipe.name
        return f"<Plan {name}, {recipe}: {self.memory_gib:.1f} GiB, {fits}{days}>"

    def rows(self) -> list[Row]:
        """A row for each class of memory: bytes on the device and on the host."""
        memory = self.plan.step.memory
        return [
            {"class": name, "device_bytes": size, "host_bytes": memory.host.get(name, 0)}
            for name, size in memory.device.items()
        ]

    def as_json(self) -> dict[str, Any]:
        """Memory, step, traffic, budget and expectation."""
        more: dict[str, Any] = {} if self.gap is None else {"gap": self.gap.as_json()}
        more |= {"defaults": self.note} if self.note else {}
        from narrowgauge.trainer.cluster.plan.plan import as_json

        return as_json(self.plan, self.tokens, self.price) | more

    def show(self, console: Console) -> None:
        """Print the plan, and whether the recipe pays if that was asked."""
        from narrowgauge.trainer.cluster.plan.plan_text import print_plan

        print_plan(self.plan, console, self.tokens, self.price, self.words)
        for line in filter(None, (self.gap and self.gap.line, self.note)):
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    def plot(self) -> str:
        """The memory of a device by class, in GiB."""
        sizes = {row["class"]: row["device_bytes"] / 2**30 for row in self.rows() if row["device_bytes"]}
        return bars({name: (x, x, x) for name, x in sizes.items()}, "memory of a device", ".2f", " GiB")


@checked
def plan(
    model: Section | None = None,
    recipe: RecipeLike | None = None,
    cluster: Annotated[str | Path | None, Form("SPEC", cluster_name), _CLUSTERS] = None,
    tokens: Annotated[int | float | str | None, Form("N", given.parse_amount)] = None,
    devices: given.Count = 1,
    *,
    price: Annotated[str | None, Form("P")] = None,
    gap: Annotated[bool, Form()] = False,
    backend: str = "auto",
    line: given.Line | None = None,
    **sections: Section,
) -> PlanResult:
    """Estimate a run before it starts: memory by class, traffic, time, cost.

        ng.plan(model="llama3-8b", recipe="mxfp8", cluster="b200", devices=8, tokens=10**12)

        narrowgauge plan --model llama3-1b --recipe msamp-o2 --memory-limit 24GB
        narrowgauge plan my.toml --cluster h100 --devices 64 --tokens 300B

    Args:
        model: A named size, or the section `model` as a dictionary. What is not given of the training of a
            model is as published (`narrowgauge.trainer.models.published`).
        recipe: A recipe's name, path, dictionary, or a `Recipe`; None for the default.
        cluster: A shipped cluster, or a .toml file; None for this machine, without a time.
        tokens: Training tokens, as in 300B (default: from the steps).
        devices: Number of devices.
        price: Price of a device-hour, such as 2.50USD (the cluster's).
        gap: Forecast the recipe's loss gap and compare it with the time saved.
        backend: "auto", "native" or "emulated".
        line: A command line in place of the model, the recipe and the sections.
        sections: Further sections of the configuration, as for `train`.

    Returns:
        The plan.

    Raises:
        UserError: A name or value is wrong, the devices cannot share the batch, or there is a budget, a price
            or a gap without a cluster.
    """
    from rich.console import Console

    from narrowgauge.trainer.cluster.plan.plan import breakeven, make_plan
    from narrowgauge.trainer.training.config.config import with_published

    values = values_of(line, {"model": model, **sections})
    values, note = (values, "") if line is not None and line.config else with_published(values)
    config = config_of(values, recipe, backend, None)
    machine = None if cluster is None else load_cluster(str(cluster))
    count = 0 if tokens is None else int(tokens_of(str(tokens)))
    if machine is None and (count or price or gap):
        raise UserError("--tokens, --price and --gap need to know the machine; name one with --cluster")
    asked = None if price is None else parse_price("--price", price)
    with nullcontext() if line is None else Console(stderr=True).status("") as status:
        found = make_plan(config, devices, machine, *(() if status is None else (status.update,)))
        decision = breakeven(found, count) if machine is not None and gap else None
    return PlanResult(found, count, asked, decision, line.command_line if line else ("plan",), note)
