"""The design of an experiment: arms, seeds, rungs and jobs.

    arm     a recipe or any other set of keys; the first is the reference
    seed    a block: all arms have the same initial weights and process the same tokens in the same order
    rung    a number of optimizer steps after which each arm is measured, with its learning rate decayed
    job     a running process; several jobs train side by side

A comparison is the default case: one rung, one job. Its runs take turns, and each is validated according
to its configuration. The table [experiment] of a TOML file, `--rungs` or `--jobs` make a measured
experiment: each run ends with two losses on the same held-out tokens (`jobs`).

An arm with one seed is a chain. Its trunk is the run of the highest rung. The run of a lower rung is a
branch: it leaves the trunk where its learning rate begins to decay (`runs.use.branch`). All rungs
together take little more time than the highest.

With `fork = N` all arms of a seed share the reference's first N steps and differ only in what
follows. Gaps then show what a format costs, and not the luck of a warm-up. Without it they also show
whether a format starts. An arm whose state has another format than the reference's cannot fork.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from narrowgauge.errors import UserError
from narrowgauge.experiment.grid import Point, Seeds, Variant, make_points
from narrowgauge.report.verdict.rule import is_control
from narrowgauge.training import Config

_SPARE = 8  # checkpoints in addition to those at multiples, for a trunk that was stopped by signals


@dataclass(frozen=True)
class RungRun:
    """The run of one arm, seed and rung.

    Attributes:
        name: Its directory, below that of the experiment.
        rung: The index of the rung, from 1.
        config: Its configuration.
        branch: The step at which it leaves its trunk, or the trunk its fork; None if it starts at step 0.
    """

    name: str
    rung: int
    config: Config
    branch: int | None

    @property
    def tokens(self) -> int:
        """The number of tokens processed by its end."""
        t = self.config.training
        return t.steps * t.batch_size * self.config.data.sequence_length

    @property
    def tokens_to_train(self) -> int:
        """The tokens that the run itself trains on: all of them, or those after the branch."""
        return self.tokens * (self.config.training.steps - (self.branch or 0)) // self.config.training.steps


@dataclass(frozen=True)
class Chain:
    """One arm of one seed: the trunk, and a branch for each lower rung.

    `fork` is the run of the reference's first steps that all arms of the seed share; None without one.
    """

    arm: str
    seed: int
    trunk: RungRun
    branches: tuple[RungRun, ...]
    fork: RungRun | None = None

    @property
    def runs(self) -> tuple[RungRun, ...]:
        """The runs, lowest rung first."""
        return (*self.branches, self.trunk)


@dataclass(frozen=True)
class Experiment:
    """Chains in the order of training, and how to run them.

    Attributes:
        arms: The names of the arms, the reference first.
        seeds: The blocks.
        chains: One for each arm and seed.
        is_measured: Whether each run ends with two losses on the same held-out tokens.
        jobs: The number of simultaneous runs.
        threads: CPU threads of each run; 0 if each configuration has the number.
        `products`: The precision of a CPU's matmuls, "bf16" or "fp32"; "" to have each run measure.
        attention: The attention of a CPU, "in-order", "fp32" or "torch"; "" to have each run measure.
        rows: The file of the results; None for `runs.csv` in the directory of the runs. A chain whose rows
            are all there is not trained again, so an experiment continues on another machine.
        probes: Whether the arms are probed at the end (`experiment.probe`).
    """

    arms: tuple[str, ...]
    seeds: tuple[int, ...]
    chains: tuple[Chain, ...]
    is_measured: bool = False
    jobs: int = 1
    threads: int = 0
    products: str = ""
    attention: str = ""
    rows: Path | None = None
    probes: bool = True

    @property
    def runs(self) -> list[RungRun]:
        """The runs of all chains."""
        return [run for chain in self.chains for run in chain.runs]

    @property
    def rungs(self) -> int:
        """The number of rungs."""
        return len(self.chains[0].runs)

    @property
    def family(self) -> list[str]:
        """The arms that the experiment compares: all except the reference and controls."""
        return [arm for arm in self.arms[1:] if not is_control(arm, self.arms[0])]


def make_comparison(values: Mapping[str, Any], arms: Sequence[Variant], seeds: Seeds = None) -> Experiment:
    """The experiment of one rung and one job: every point is a run with its given values.

    Raises:
        UserError: a configuration is invalid, or there are fewer than two runs.
    """
    chains = []
    for point in make_points(values, arms, seeds):
        arm, _ = _arm_of(point)
        chains.append(Chain(arm, point.config.training.seed, RungRun(point.name, 1, point.config, None), ()))
    return _experiment(chains)


def make_measured(
    values: Mapping[str, Any],
    arms: Sequence[Variant],
    seeds: Seeds,
    table: Mapping[str, Any],
) -> Experiment:
    """The measured experiment of the table [experiment], whose values the caller may have overridden.

    Raises:
        UserError: a configuration is invalid, or the rungs cannot share a trunk.
    """
    rungs = _rungs(table.get("rungs", []))
    values = {**values, "training": {**values.get("training", {}), "steps": rungs[-1]}}
    points = make_points(values, arms, seeds)
    chains = [_chain(point, rungs, table) for point in points]
    if "fork" in table:
        chains = _forked(chains, _positive(table, "fork", 1))
    order = table.get("order", [])
    group_of = {name: number for number, group in enumerate(order) for name in group} | {chains[0].arm: 0}
    return replace(
        _experiment(chains),
        chains=tuple(sorted(chains, key=lambda chain: group_of.get(chain.arm.partition(",")[0], len(order)))),
        is_measured=True,
        jobs=_positive(table, "jobs", 1),
        threads=_positive(table, "threads", 1),
        products=str(table.get("products", "")),
        attention=str(table.get("attention", "")),
        rows=Path(table["rows"]) if "rows" in table else None,
        probes=bool(table.get("probe", True)),
    )


def _experiment(chains: Sequence[Chain]) -> Experiment:
    arms, seeds = dict.fromkeys(c.arm for c in chains), dict.fromkeys(c.seed for c in chains)
    return Experiment(tuple(arms), tuple(seeds), tuple(chains))


def _rungs(steps: Sequence[Any]) -> tuple[int, ...]:
    if not steps or not all(isinstance(n, int) and n > 0 for n in steps) or sorted(set(steps)) != list(steps):
        raise UserError(
            f"rungs = {list(steps)} must be optimizer steps in ascending order, such as 320,640,1280"
        )
    return tuple(steps)


def _positive(table: Mapping[str, Any], key: str, default: int) -> int:
    value = table.get(key, default)
    if not isinstance(value, int) or value < 1:
        raise UserError(f"[experiment] {key} = {value!r} must be a whole number above 0")
    return value


def _chain(point: Point, rungs: tuple[int, ...], table: Mapping[str, Any]) -> Chain:
    """The trunk and the branches of one arm and seed, with the checkpoints that they need."""
    config = _measured(point.config, table)
    arm, suffix = _arm_of(point)
    starts = [_branch_step(config, steps) for steps in rungs[:-1]]
    if starts:
        every = math.gcd(*starts, config.checkpoint.every)
        keep = max(config.checkpoint.keep, (rungs[-1] - starts[0]) // every + 2 + _SPARE)
        saves = {"every": every, "keep": keep, "every_minutes": math.inf}
        config = _with(config, checkpoint=saves)
    branches = tuple(
        RungRun(f"{arm},steps={steps}{suffix}", number, _of_length(config, steps), start)
        for number, (steps, start) in enumerate(zip(rungs, starts, strict=False), start=1)
    )
    for branch in branches:
        _require_shared(branch, config)
    return Chain(arm, config.training.seed, RungRun(point.name, len(rungs), config, None), branches)


def _forked(chains: Sequence[Chain], step: int) -> list[Chain]:
    """The chains, each starting after `step` steps of the first arm of its seed.

    Raises:
        UserError: the learning rate of a run has begun to fall by then.
    """
    forks: dict[int, RungRun] = {}
    for chain in chains:
        if chain.seed not in forks:  # the reference comes first
            config = _with(
                chain.trunk.config,
                training={"steps": step},
                schedule={"kind": "constant"},
                checkpoint={"every": step, "every_minutes": math.inf},
                validation={"every": step, "batches": 1},
            )
            forks[chain.seed] = RungRun(f"fork-seed-{chain.seed}", 0, config, None)
    for run in (chain.runs[0] for chain in chains):
        first = run.config.plan.decay_start
        if first is not None and step >= first:
            raise UserError(
                f"[experiment] fork = {step}: the learning rate of {run.name} falls from step {first} on; "
                "fork earlier, or raise the lowest rung"
            )
    return [
        replace(chain, trunk=replace(chain.trunk, branch=step), fork=forks[chain.seed]) for chain in chains
    ]


def _arm_of(point: Point) -> tuple[str, str]:
    """The name of a point's arm, and the suffix of the point's name that gives its seed."""
    end = f"-seed-{point.config.training.seed}"
    return (point.name.removesuffix(end), end) if point.name.endswith(end) else (point.name, "")


def _measured(config: Config, table: Mapping[str, Any]) -> Config:
    """The configuration with a validation on `held_out_tokens` at the end of the run."""
    tokens = config.training.micro_batch_size * config.data.sequence_length
    wanted = table.get("held_out_tokens", tokens * config.validation.batches)
    if not isinstance(wanted, int) or wanted < tokens or wanted % tokens:
        raise UserError(
            f"[experiment] held_out_tokens = {wanted!r} must be a multiple of a micro-batch, {tokens} tokens"
        )
    return _with(config, validation={"every": config.training.steps, "batches": wanted // tokens})


def _of_length(config: Config, steps: int) -> Config:
    return _with(config, training={"steps": steps}, validation={"every": steps})


def _with(config: Config, **sections: Mapping[str, Any]) -> Config:
    """The configuration with other values of some keys, by section."""
    update = {name: getattr(config, name).model_copy(update=keys) for name, keys in sections.items()}
    return config.model_copy(update=update)


def _branch_step(config: Config, steps: int) -> int:
    """The last step before the learning rate of a run of `steps` steps decays."""
    s = config.schedule
    if s.kind != "wsd":
        raise UserError(
            f"schedule.kind = {s.kind!r} with several rungs: a branch needs a rate that is constant until it "
            "falls; set --schedule.kind wsd, or give one rung"
        )
    first = replace(config.plan, steps=steps).decay_start
    assert first is not None
    if steps * (1 - s.decay_fraction) < s.warmup_steps or first < 2:
        raise UserError(
            f"a rung of {steps} steps ends before its warm-up of {s.warmup_steps} steps and its fall; take a "
            "higher rung or a shorter warm-up"
        )
    return first - 1


def _require_shared(branch: RungRun, trunk: Config) -> None:
    """Refuse a recipe that would have computed the steps before the branch differently."""
    assert branch.branch is not None
    last = _branch_step(trunk, trunk.training.steps)
    own, of_trunk = (branch.config.training.steps, branch.branch + 1), (trunk.training.steps, last + 1)
    for rule in branch.config.spec.recipe.rules:
        for step in range(1, branch.branch + 1):
            if rule.holds(step, *own) != rule.holds(step, *of_trunk):
                raise UserError(
                    f"{branch.name}: a rule of recipe {trunk.recipe.name!r} differs in step {step} of "
                    f"{own[0]} and of {of_trunk[0]} steps, so they cannot share a trunk; let it begin with "
                    "the fall of the learning rate or later"
                )
