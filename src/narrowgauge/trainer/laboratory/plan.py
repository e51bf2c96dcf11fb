"""`plan`: what a run will take on a cluster or on this machine, before it starts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from narrowgauge.recipes import RecipeLike
from narrowgauge.system.errors import UserError, checked
from narrowgauge.system.result import Result, Row
from narrowgauge.trainer.cluster.plan.budget import Price, parse_price, tokens_of
from narrowgauge.trainer.cluster.plan.cluster_spec import Cluster, load_cluster
from narrowgauge.trainer.cluster.plan.pays import Breakeven, breakeven
from narrowgauge.trainer.cluster.plan.plan import Plan, as_json, make_plan
from narrowgauge.trainer.cluster.plan.plan_text import print_plan
from narrowgauge.trainer.laboratory.chart import bars
from narrowgauge.trainer.laboratory.settings import Section, config_of, values_of
from narrowgauge.trainer.training import Config
from narrowgauge.trainer.training.config.named import with_published


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
        return as_json(self.plan, self.tokens, self.price) | more

    def show(self, console: Console) -> None:
        """Print the plan, and whether the recipe pays if that was asked."""
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
    cluster: str | Path | None = None,
    tokens: int | float | str | None = None,
    devices: int = 1,
    *,
    price: str | None = None,
    gap: bool = False,
    backend: str = "auto",
    **sections: Section,
) -> PlanResult:
    """Plan a run: memory by class, traffic, time at best and expected, cost.

        ng.plan(model="llama3-8b", recipe="mxfp8", cluster="b200", devices=8, tokens=10**12)

    Args:
        model: A named size, or the section `model` as a dictionary. What is not given of the training of a
            model is as published (`narrowgauge.trainer.models.published`).
        recipe: A recipe's name, path, dictionary, or a `Recipe`; None for the default.
        cluster: A shipped cluster, or a .toml file; None for this machine, without a time.
        tokens: Tokens to train on, as a number or as text such as "300B"; None for as many as
            `training.steps` take.
        devices: Devices in all, laid out by the section `parallel`.
        price: The price of a device-hour, such as "2.50USD"; None for the cluster's.
        gap: Whether to forecast the recipe's loss gap, and say whether its speed pays for it.
        backend: "auto", "native" or "emulated".
        sections: Further sections of the configuration, as for `train`.

    Returns:
        The plan.

    Raises:
        UserError: A name or value is wrong, or the devices cannot share the batch.
    """
    values, note = with_published(values_of({"model": model, **sections}))
    config = config_of(recipe, backend, values)
    machine = None if cluster is None else load_cluster(str(cluster))
    count = 0 if tokens is None else tokens_of(tokens if isinstance(tokens, str) else f"{tokens}")
    return plan_config(config, machine, count, devices, price, gap, note=note)


def plan_config(
    config: Config,
    cluster: Cluster | None,
    tokens: int = 0,
    devices: int = 1,
    price: str | None = None,
    gap: bool = False,
    words: Sequence[str] = ("plan",),
    note: str = "",
    show: Callable[[str], object] = lambda text: None,
) -> PlanResult:
    """Plan a configuration; `note` states where its values come from, `show` takes words before each part.

    Raises:
        UserError: A budget, a price or a gap without a cluster.
    """
    if cluster is None and (tokens or price or gap):
        raise UserError("--tokens, --price and --gap need to know the machine; name one with --cluster")
    asked = None if price is None else parse_price("--price", price)
    found = make_plan(config, devices, cluster, show)
    decision = breakeven(found, devices, cluster, tokens) if cluster is not None and gap else None
    return PlanResult(found, tokens, asked, decision, words, note)
