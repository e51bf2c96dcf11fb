"""The design of an experiment: arms, seeds, rungs and jobs.

    arm     a recipe (--recipes) or any other set of keys (--variant, or the table [arms] of a TOML file); the
            first is the reference
    seed    a block: all arms have the same initial weights and process the same tokens in the same order
    rung    a number of optimizer steps after which each arm is measured, with its learning rate decayed
    job     a running process; several jobs train side by side

A run directory is named after its arm and seed: `fp8`, `fp8-seed-7`. So the same command line continues a
comparison, and one with more recipes, variants or seeds reuses the existing runs.

A comparison without rungs is the default case: each run is validated according to its configuration. The
table [experiment] of a TOML file, `--rungs` or `--jobs` make a measured experiment: each run ends with two
losses on the same held-out tokens (`jobs`).

The run of the highest rung is the trunk of its arm and seed. The run of a lower rung is a branch: it leaves
the trunk where its learning rate begins to decay (`runs.use.branch`). All rungs together take little more
time than the highest.

With `fork = N` all arms of a seed share the reference's first N steps and differ only in what
follows. Gaps then show what a format costs, and not the luck of a warm-up. Without it they also show
whether a format starts. An arm whose state has another format than the reference's cannot fork.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from narrowgauge.system.errors import UserError, unknown
from narrowgauge.trainer.models import count_block_weights
from narrowgauge.trainer.report.read.stored import PlannedComparison, PlannedRun
from narrowgauge.trainer.training import Config, make_config
from narrowgauge.trainer.training.config.schema import Section

Values = Mapping[str, Mapping[str, Any]]  # nested, as TOML has them
Keys = Mapping[str, Any]  # flat: {"section.key": value}
Variant = tuple[str, Keys]  # a name, and the keys in which it differs from the shared configuration
Seeds = int | Sequence[int] | None  # how many, or which; None: that of the configuration
SEED, RECIPE = "training.seed", "recipe.name"
MOST_RUNS = 1000
# A value may contain commas, as in betas=0.9,0.95, and a table in braces anything.
_NEXT_KEY = re.compile(r",(?=[a-z_-]+(?:\.[\w.]+)?=)(?![^{]*\})")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
_SPARE = 8  # checkpoints in addition to those at multiples, for a trunk that was stopped by signals
_Count = Annotated[int, Field(gt=0, strict=True)]


class ArmRun(PlannedRun):
    """A planned run with its configuration, which its readers do not have.

    It waits until its sources have ended, and begins with the first whose checkpoint is there, or at step 0,
    with the same digits.
    """

    config: Config = Field(exclude=True)
    sources: tuple[tuple[str, int], ...] = Field((), exclude=True)  # where it may branch off, at which steps

    @classmethod
    def of(cls, config: Config, **facts: Any) -> "ArmRun":
        """The run of a configuration, with its other fields."""
        steps = config.training.steps
        return cls(config=config, steps=steps, tokens=steps * config.tokens_per_step, **facts)

    @property
    def tokens_to_train(self) -> int:
        """The tokens that the run itself trains on: all of them, or those after the branch."""
        return self.tokens * (self.steps - (self.sources[0][1] if self.sources else 0)) // self.steps


class Design(Section):
    """The table [experiment] of a configuration file, which `train` does not read.

    The runs of an arm and seed whose rows are all in the file of results are not trained again, so an
    experiment continues on another machine.
    """

    rungs: tuple[_Count, ...] = ()  # steps after which each run is measured; () if the experiment is not
    seeds: int | tuple[int, ...] | None = None  # how many, or which; None for that of the configuration
    jobs: _Count = 1  # the number of simultaneous runs
    ray: str = ""  # the address of a cluster of Ray that trains as many runs at a time as fit; "" for none
    threads: _Count | None = None  # CPU threads of each run; None if each configuration has the number
    products: str = ""  # the precision of a CPU's matmuls, "bf16" or "fp32"; "" to have each run measure
    attention: str = ""  # of a CPU, "in-order", "fp32" or "torch"; "" to have each run measure
    held_out_tokens: _Count | None = None  # of each measurement; None: as the configuration validates
    order: tuple[tuple[str, ...], ...] = ()  # groups of arms, each finished before the next begins
    fork: _Count | None = None  # the reference's steps with which all arms of a seed begin; None for none
    rows: Path | None = None  # the file of the results; None: `runs.csv` in the directory of the runs
    probe: bool = True  # whether the arms are probed at the end (`experiment.run`)


class Experiment(PlannedComparison):
    """A comparison with the configurations of its runs, and how to train them."""

    arms: tuple[str, ...] = Field(exclude=True)  # the names of the arms, the reference first
    runs: tuple[ArmRun, ...]
    design: Design = Field(exclude=True)  # how the runs are trained and measured

    @property
    def is_measured(self) -> bool:
        """Whether each run ends with two losses on the same held-out tokens."""
        return bool(self.rows)

    @property
    def compared(self) -> list[ArmRun]:
        """The runs that have results: all except forks."""
        return [run for run in self.runs if run.rung]

    @property
    def trunks(self) -> list[ArmRun]:
        """The runs at the highest rung, the reference's first."""
        return [run for run in self.runs if run.rung == self.rungs]


def make_experiment(
    values: Mapping[str, Any],
    recipes: Sequence[Variant] = (),
    variants: Sequence[Variant] = (),
    seeds: Seeds = None,
    chosen: Sequence[str] = (),
    rungs: Sequence[int] = (),
    jobs: int = 0,
) -> Experiment:
    """The experiment of some values, which may have [arms] and [experiment], and of more variants.

    The variants are `recipes`, the `chosen` arms of the file besides the reference (() for all), and
    `variants`. Seeds, rungs and jobs, if given, replace those of the file.
    """
    from narrowgauge.trainer.report.verdict.rule import is_control  # here: a command line needs no numpy

    named, (values, arms) = list(values.get("arms", {})), take_arms(values, chosen)
    table = dict(values.pop("experiment", {}))
    table |= ({"rungs": list(rungs)} if rungs else {}) | ({"jobs": jobs} if jobs else {})
    if table:
        table.setdefault("rungs", [make_config(values).training.steps])
    design = _design(table, named)
    if design.rungs:
        values["training"] = {**values.get("training", {}), "steps": design.rungs[-1]}
    points = make_runs(values, [*recipes, *arms, *variants], design.seeds if seeds is None else seeds)
    names = tuple(dict.fromkeys(run.arm for run in points))
    runs = [run for point in points for run in _chain(point, design)] if design.rungs else points
    group_of = {name: number for number, group in enumerate(design.order) for name in group} | {names[0]: 0}
    runs.sort(key=lambda run: group_of.get(run.arm, len(design.order)))
    model, rows = points[0].config.spec.model, str(design.rows.resolve()) if design.rows else "runs.csv"
    return Experiment(
        arms=names,
        reference=names[0],
        family=tuple(name for name in names[1:] if not is_control(name, names[0])),
        seeds=tuple(dict.fromkeys(run.seed for run in runs)),
        parameters=count_block_weights(model),
        is_quiet=not model.initial_std,  # no warm-up is expected to spike: the initial weights are by role
        rows=rows if design.rungs else "",
        runs=tuple(_forked(runs, design.fork) if design.fork else runs),
        design=design,
    )


def _design(table: Mapping[str, Any], arms: Sequence[str]) -> Design:
    """The table [experiment], checked."""
    try:
        design = Design.model_validate(table)
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        if first["type"] == "extra_forbidden":
            raise unknown("key of [experiment]", key, Design.model_fields) from None
        raise UserError(f"[experiment] {key} = {table[key]!r}: {first['msg'].lower()}") from None
    if sorted(set(design.rungs)) != list(design.rungs):
        raise UserError(
            f"rungs = {list(design.rungs)} must be optimizer steps in ascending order, such as 320,640,1280"
        )
    for name in (name for group in design.order for name in group):
        if name not in arms:
            raise unknown("arm in order", name, arms)
    return design


def _chain(point: ArmRun, design: Design) -> list[ArmRun]:
    """The trunk and the branches of one arm and seed, with the checkpoints that they need."""
    config, rungs = point.config, design.rungs
    tokens = config.training.micro_batch_size * config.data.sequence_length
    wanted = design.held_out_tokens or tokens * config.validation.batches
    if wanted % tokens:
        raise UserError(
            f"[experiment] held_out_tokens = {wanted!r} must be a multiple of a micro-batch, {tokens} tokens"
        )
    config = _with(config, validation={"every": config.training.steps, "batches": wanted // tokens})
    starts = [_branch_step(config, steps) for steps in rungs[:-1]]
    if starts:
        every = math.gcd(*starts, config.checkpoint.every)
        keep = max(config.checkpoint.keep, (rungs[-1] - starts[0]) // every + 2 + _SPARE)
        saves = {"every": every, "keep": keep, "every_minutes": math.inf}
        config = _with(config, checkpoint=saves)
    trunk = point.model_copy(update={"config": config, "rung": len(rungs)})
    branches = [
        ArmRun.of(
            _with(config, training={"steps": steps}, validation={"every": steps}),
            name=f"{point.arm},steps={steps}{point.name.removeprefix(point.arm)}",
            arm=point.arm,
            seed=point.seed,
            rung=number,
            sources=((trunk.name, start),),
        )
        for number, (steps, start) in enumerate(zip(rungs, starts, strict=False), start=1)
    ]
    for branch in branches:
        _require_shared(branch, config)
    return [trunk, *branches]


def _forked(runs: Sequence[ArmRun], step: int) -> list[ArmRun]:
    """The forks, and the runs, each starting after `step` steps of the first arm of its seed."""
    forks: dict[int, ArmRun] = {}
    for run in runs:
        first = run.config.decay_start
        if first is not None and step >= first:
            raise UserError(
                f"[experiment] fork = {step}: the learning rate of {run.name} falls from step {first} on; "
                "fork earlier, or raise the lowest rung"
            )
        if run.seed not in forks:  # the reference's trunk comes first
            config = _with(
                run.config,
                training={"steps": step},
                schedule={"kind": "constant"},
                checkpoint={"every": step, "every_minutes": math.inf},
                validation={"every": step, "batches": 1},
            )
            name = f"fork-seed-{run.seed}"
            forks[run.seed] = ArmRun.of(config, name=name, arm="fork", seed=run.seed, rung=0)
    begun = [run.model_copy(update={"sources": (*run.sources, (forks[run.seed].name, step))}) for run in runs]
    return [*forks.values(), *begun]


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
    first = config.with_training(steps=steps).decay_start
    assert first is not None
    if steps * (1 - s.decay_fraction) < s.warmup_steps or first < 2:
        raise UserError(
            f"a rung of {steps} steps ends before its warm-up of {s.warmup_steps} steps and its fall; take a "
            "higher rung or a shorter warm-up"
        )
    return first - 1


def _require_shared(branch: ArmRun, trunk: Config) -> None:
    """Refuse a recipe that would have computed the steps before the branch differently."""
    ((_, start),) = branch.sources
    last = _branch_step(trunk, trunk.training.steps)
    own, of_trunk = (branch.config.training.steps, start + 1), (trunk.training.steps, last + 1)
    for rule in branch.config.spec.recipe.rules:
        for step in range(1, start + 1):
            if rule.holds(step, *own) != rule.holds(step, *of_trunk):
                raise UserError(
                    f"{branch.name}: a rule of recipe {trunk.recipe.name!r} differs in step {step} of "
                    f"{own[0]} and of {of_trunk[0]} steps, so they cannot share a trunk; let it begin with "
                    "the fall of the learning rate or later"
                )


def take_arms(values: Mapping[str, Any], chosen: Sequence[str] = ()) -> tuple[dict[str, Any], list[Variant]]:
    """Split off the table [arms]: the other values, and a variant for each arm.

    If some are `chosen`, only these are left in the order of the file, and the first, the reference.
    """
    arms: list[Variant] = []
    for name, table in values.get("arms", {}).items():
        if not isinstance(table, Mapping) or not all(isinstance(t, Mapping) for t in table.values()):
            raise UserError(
                f"[arms] {name} = {table!r}: an arm has keys with their sections; write recipe.name = "
                f"{name!r} below [arms.{name}]"
            )
        keys = {f"{section}.{key}": value for section, t in table.items() for key, value in t.items()}
        arms.append((name, keys))
    known = [name for name, _ in arms]
    for name in chosen:
        if name not in known:
            raise unknown("arm", name, known)
    arms = [(name, keys) for name, keys in arms if not chosen or name in (known[0], *chosen)]
    return {section: table for section, table in values.items() if section != "arms"}, arms


def parse_variant(text: str, short: Mapping[str, str]) -> Variant:
    """Parse `--variant NAME:KEY=VALUE,KEY=VALUE`; a key is a `section.key`, or a name in `short`.

    >>> parse_variant("hp:recipe=fp8,recipe.wgrad.x=bf16", {"recipe": "recipe.name"})
    ('hp', {'recipe.name': 'fp8', 'recipe.wgrad.x': 'bf16'})
    """
    name, _, rest = text.partition(":")
    keys: dict[str, str] = {}
    for pair in _NEXT_KEY.split(rest) if rest else []:
        key, equals, value = pair.partition("=")
        key = short.get(key, key)
        if not equals or "." not in key:
            raise UserError(
                f"--variant {text}: {pair!r} is not KEY=VALUE; write NAME:KEY=VALUE,KEY=VALUE with keys such "
                "as recipe.wgrad.x or optimizer.lr"
            )
        if key in keys:
            raise UserError(f"--variant {text}: {key} has two values; leave one of them out")
        keys[key] = value
    return name, keys


def make_runs(values: Values, variants: Sequence[Variant], seeds: Seeds = None) -> list[ArmRun]:
    """List the runs of a comparison in their order: all variants with the first seed, then with the next.

    Without variants the shared values are the only one, named after their recipe. A number of seeds counts
    from the seed of the configuration.
    """
    base = make_config(values)
    base_seed = base.training.seed
    seeds = 1 if seeds is None else seeds
    chosen = tuple(range(base_seed, base_seed + seeds) if isinstance(seeds, int) else seeds)
    if not chosen or len(set(chosen)) < len(chosen):
        raise UserError(f"--seeds {seeds}: a seed makes one run of each variant; name each once")
    variants = variants or [(Path(base.recipe.name).stem, {})]
    count = len(variants) * len(chosen)
    if count > MOST_RUNS:
        raise UserError(f"this comparison has {count} runs, and one may have {MOST_RUNS}; make it smaller")
    for name, keys in variants:
        if not _NAME.fullmatch(name):
            raise UserError(
                f"--variant {name!r} names a directory; use letters, digits and any of _ . + - in it"
            )
        if SEED in keys:
            raise UserError(f"variant {name!r} sets {SEED}; seeds are for all variants, by --seeds")
    runs = []
    for seed in chosen:
        suffix = "" if seed == base_seed else f"-seed-{seed}"
        for arm, keys in variants:
            config = make_config(with_keys(values, {**keys, SEED: seed}))
            runs.append(ArmRun.of(config, name=arm + suffix, arm=arm, seed=seed))
    names = [run.name for run in runs]
    if len(names) < 2:
        raise UserError(
            f"{names[0]!r} is one run, and a comparison needs at least two; name recipes, as in "
            "--recipes bf16,fp8, or add --variant or --seeds"
        )
    if twice := {name for name in names if names.count(name) > 1}:
        raise UserError(
            f"two runs would be called {min(twice)!r}, and each needs a separate directory; name a recipe "
            "once, or give the runs names by --variant"
        )
    return runs


def with_keys(values: Values, keys: Keys) -> dict[str, dict[str, Any]]:
    """Nested values, overridden by flat keys."""
    merged = {section: dict(table) for section, table in values.items()}
    for key, value in keys.items():
        section, _, name = key.partition(".")
        merged.setdefault(section, {})[name] = value
    return merged
