"""Configuration changes that lower the memory of a step, and the smallest change with which it fits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from narrowgauge.distributed import ParallelDims
from narrowgauge.simulate.memory import Memory
from narrowgauge.simulate.memory_estimate import estimate_memory
from narrowgauge.simulate.step import ALONE
from narrowgauge.training.config.config import Config, make_config


@dataclass
class _Change:
    options: str  # on the command line
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    parallel_dims: ParallelDims | None = None


def cheaper(
    config: Config, has_host: bool = True, parallel_dims: ParallelDims = ALONE, wider: bool = False
) -> list[tuple[str, Memory]]:
    """Changes that lower the peak: each alone, then all together.

    Args:
        config: the configuration to change.
        has_host: whether the host's memory is separate from the device's.
        parallel_dims: the mesh of the run.
        wider: also try other meshes and recipes.

    Returns:
        Pairs of command-line options and the expected memory with them.
    """
    changes = _settings(config, has_host)
    if len(changes) > 1:
        together = _Change(" ".join(c.options for c in changes))
        for change in changes:
            for section, values in change.values.items():
                together.values[section] = together.values.get(section, {}) | values
        changes.append(together)
    if not config.training.recompute:
        changes.append(_Change("--training.recompute selective", {"training": {"recompute": "selective"}}))
    if wider:
        changes += _wider(config, parallel_dims)
    return [
        (c.options, estimate_memory(_changed(config, c.values), c.parallel_dims or parallel_dims))
        for c in changes
    ]


def fitting(
    config: Config,
    fits: Callable[[Memory], bool],
    has_host: bool = True,
    parallel_dims: ParallelDims = ALONE,
) -> tuple[str, Memory] | None:
    """The smallest change with which a step fits: settings before recipes, the cheapest in time first.

    Settings are added until the step fits, and those that turn out to be unnecessary are dropped. Only if all
    of them together do not suffice, a recipe of narrower state is chosen.

    Args:
        config: the configuration to change.
        fits: whether a step's memory fits.
        has_host: whether the host's memory is separate from the device's.
        parallel_dims: the mesh of the run.

    Returns:
        Command-line options and the expected memory with them; None if nothing makes it fit.
    """

    def tried(changes: Sequence[_Change]) -> tuple[str, Memory]:
        values: dict[str, dict[str, Any]] = {}
        for change in changes:
            for section, of_section in change.values.items():
                values[section] = values.get(section, {}) | of_section
        memory = estimate_memory(_changed(config, values), parallel_dims)
        return " ".join(change.options for change in changes), memory

    settings = _settings(config, has_host)
    for recipe in [[], *([change] for change in _narrower_recipes(config))]:
        if not fits(tried([*settings, *recipe])[1]):
            continue
        needed = list(settings)
        for change in reversed(settings):  # the most expensive first
            fewer = [c for c in needed if c is not change]
            if fits(tried([*fewer, *recipe])[1]):
                needed = fewer
        return tried([*recipe, *needed])
    return None


def _settings(config: Config, has_host: bool) -> list[_Change]:
    """The settings that lower the peak, the cheapest in time first."""
    changes = []
    if not config.training.chunked_loss:
        changes.append(_Change("--training.chunked_loss true", {"training": {"chunked_loss": True}}))
    if config.training.micro_batch_size > 1:
        changes.append(_Change("--training.micro_batch_size 1", {"training": {"micro_batch_size": 1}}))
    if config.training.recompute is not True:
        changes.append(_Change("--training.recompute true", {"training": {"recompute": True}}))
    if has_host and not config.spec.recipe.offload:
        options = "--recipe.offload master,grad,m,v"
        changes.append(_Change(options, {"recipe": {"offload": "master,grad,m,v"}}))
    return changes


def _narrower_recipes(config: Config) -> list[_Change]:
    """Recipes of narrower state, the widest first; none if the user changed places of the recipe."""
    own = config.spec.recipe.state
    if own["m"] is None or config.recipe.places:
        return []
    if any(c.element.bits < 32 for c in own.values() if c is not None):
        return []
    return [_Change(f"--recipe {name}", {"recipe": {"name": name}}) for name in ("msamp-o2", "msamp-o3")]


def _wider(config: Config, parallel_dims: ParallelDims) -> list[_Change]:
    """Other meshes of the same processes, twice as many processes, narrower state."""
    changes = []
    if parallel_dims.shard > 1 and parallel_dims.zero < 3:
        changes.append(_Change("--parallel.zero 3", parallel_dims=replace(parallel_dims, zero=3)))
    if parallel_dims.replicate > 1:
        options = f"--parallel.replicate 1 --parallel.shard {parallel_dims.data}"
        changes.append(
            _Change(options, parallel_dims=replace(parallel_dims, replicate=1, shard=parallel_dims.data))
        )
    twice = replace(parallel_dims, shard=2 * parallel_dims.shard)
    if config.training.batch_size % (twice.data * config.training.micro_batch_size) == 0:
        options = f"--devices {twice.size} --parallel.shard {twice.shard}"
        changes.append(_Change(options, parallel_dims=twice))
    return changes + _narrower_recipes(config)[-1:]  # the narrowest


def _changed(config: Config, values: dict[str, dict[str, Any]]) -> Config:
    tables = config.model_dump()
    tables["recipe"] |= tables["recipe"].pop("places")
    for section, changes in values.items():
        tables[section] |= changes
    return make_config(tables)
