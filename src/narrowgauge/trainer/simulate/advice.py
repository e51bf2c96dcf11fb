"""Configuration changes that lower the memory of a step, and the smallest change with which it fits."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

from narrowgauge.distributed import ParallelDims
from narrowgauge.recipes import OFFLOADABLE, STATE_PLACES, Recipe, recipe, recipe_names
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.models import count_parameters
from narrowgauge.trainer.simulate.memory import STATE, Memory
from narrowgauge.trainer.simulate.memory_estimate import estimate_memory
from narrowgauge.trainer.simulate.step import SINGLE
from narrowgauge.trainer.training.config.config import Config, make_config

Change = Mapping[str, Any]  # values by key
_COSTS = (
    "training.chunked_loss",
    "training.micro_batch_size",
    "training.recompute",
    "recipe.offload",
)  # in time
_SHORTEST = 128  # tokens of a sequence


def cheaper(
    config: Config, has_host: bool = True, parallel_dims: ParallelDims = SINGLE, wider: bool = False
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
    settings = _settings(config, has_host)
    changes: list[Change] = [{key: value} for key, value in settings.items()]
    changes += [settings] * (len(settings) > 1)
    changes += [] if config.training.recompute else [{"training.recompute": "selective"}]
    if wider and (names := narrower_recipes(config)):
        changes.append({"recipe.name": min(names, key=lambda name: _bits(recipe(name), ("weight",)))})
    found = [(_options(c), estimate_memory(_changed(config, c), parallel_dims)) for c in changes]
    meshes = _meshes(config, parallel_dims) if wider else {}
    return found + [(options, estimate_memory(config, dims)) for options, dims in meshes.items()]


def fitting(
    config: Config,
    fits: Callable[[Memory], bool],
    has_host: bool = True,
    parallel_dims: ParallelDims = SINGLE,
    recipes: Sequence[str] = (),
) -> tuple[str, Memory] | None:
    """The smallest change with which a step fits: settings first, then recipes, then shorter sequences.

    Each recipe is tried with all settings that lower the memory, so nothing fits if none of these does. Of a
    combination that fits, the settings that turn out to be unnecessary are dropped.

    Args:
        config: the configuration to change.
        fits: whether a step's memory fits.
        has_host: whether the host's memory is separate from the device's.
        parallel_dims: the mesh of the run.
        recipes: other recipes to choose from; none for all that ship.

    Returns:
        Command-line options and the expected memory with them; None if nothing makes it fit.
    """

    def tried(change: Change) -> Memory:
        return estimate_memory(_changed(config, change), parallel_dims)

    def first(changes: Sequence[Change]) -> Change | None:
        """The first change that fits together with settings."""
        for change, corner in product(changes, _corners(config, has_host, parallel_dims)):
            together = {**change, **corner}
            with suppress(UserError):  # a recipe that this model or these places do not allow
                if fits(tried(together)):
                    return together
        return None

    own = count_parameters(config.spec.model) / parallel_dims.size
    weights = {name: int(own * size) for name, size in least_state(config, has_host, recipes).items()}
    changes = [
        {"recipe.name": name} if name else {}
        for name, size in weights.items()
        if fits(Memory(dict.fromkeys(STATE, 0) | {"weights": size}, {}, int(own)))
    ]
    found, whole = first(changes), config.data.sequence_length
    lengths = [whole >> n for n in range(1, whole.bit_length()) if whole >> n >= _SHORTEST]
    shorter = [[c | {"data.sequence_length": length} for c in changes] for length in lengths]
    if found is None and shorter and first(shorter[-1]):
        found = next(filter(None, map(first, shorter)))
    if found is None:
        return None
    for key in reversed(_COSTS):  # the most expensive first
        fewer = {name: value for name, value in found.items() if name != key}
        if fits(tried(fewer)):
            found = fewer
    return _options(found), tried(found)


def narrower_recipes(config: Config, names: Sequence[str] = ()) -> list[str]:
    """Recipes with a place of state narrower than the configuration's; those of the narrowest state first.

    Recipes whose state is alike count once. `names` are those to choose from; none for all that ship.
    """
    own, found = config.spec.recipe, dict[tuple[int, ...], str]()
    for name in names or recipe_names():
        bits = tuple(_bits(recipe(name), (place,)) for place in own.state)
        if any(b < _bits(own, (place,)) for b, place in zip(bits, own.state, strict=True)):
            found.setdefault(bits, name)
    return [found[bits] for bits in sorted(found, key=sum)]


def least_state(config: Config, has_host: bool, names: Sequence[str] = ()) -> dict[str, float]:
    """Bytes of a device's state for each parameter that no setting lowers, by the name of the recipe.

    "" stands for the configuration's own recipe; the others are those of narrower state that it allows.
    """
    places = [place for place in STATE_PLACES if not (has_host and place in OFFLOADABLE)]
    recipes = {"": config.spec.recipe}
    for name in narrower_recipes(config, names):
        with suppress(UserError):
            recipes[name] = _changed(config, {"recipe.name": name}).spec.recipe
    return {name: _bits(one, places) / 8 for name, one in recipes.items()}


def _bits(of: Recipe, places: Sequence[str]) -> int:
    """The bits of an element in some places of state together, in the layers where they are fewest."""
    layers = (of.state, *({**of.state, **rule.state} for rule in of.rules))
    kept = ([cast for place in places if (cast := state[place]) is not None] for state in layers)
    return min(sum(cast.element.bits for cast in casts) for casts in kept)


def _settings(config: Config, has_host: bool) -> Change:
    """The settings that lower the peak, the cheapest in time first."""
    wanted = dict(zip(_COSTS, (True, 1, True, ",".join(OFFLOADABLE)), strict=True))
    if not has_host or set(config.spec.recipe.offload) == set(OFFLOADABLE):
        del wanted["recipe.offload"]
    return _new(config, wanted)


def _new(config: Config, wanted: Change) -> Change:
    """The values that a configuration does not have already."""
    tables = config.model_dump()
    split = ((*key.split("."), value) for key, value in wanted.items())
    return {f"{table}.{key}": value for table, key, value in split if tables[table].get(key) != value}


def _corners(config: Config, has_host: bool, parallel_dims: ParallelDims) -> Iterator[Change]:
    """The settings among which the least memory of a recipe lies.

    A chunked loss keeps the gradient of the head instead of logits, and a single micro-batch has no gradients
    of others to add to; either may take less or more.
    """
    share = config.training.batch_size // parallel_dims.data
    sizes = dict.fromkeys((1, share)) if parallel_dims.pipeline == 1 else (1,)
    for size, chunked in product(sizes, (True, False)):
        freely = {"training.micro_batch_size": size, "training.chunked_loss": chunked}
        yield _new(config, {**_settings(config, has_host), **freely})


def _meshes(config: Config, parallel_dims: ParallelDims) -> dict[str, ParallelDims]:
    """Other meshes of the same processes, and twice as many processes, by their options."""
    meshes = {}
    if parallel_dims.shard > 1 and parallel_dims.zero < 3:
        meshes["--parallel.zero 3"] = replace(parallel_dims, zero=3)
    if parallel_dims.replicate > 1:
        options = f"--parallel.replicate 1 --parallel.shard {parallel_dims.data}"
        meshes[options] = replace(parallel_dims, replicate=1, shard=parallel_dims.data)
    twice = replace(parallel_dims, shard=2 * parallel_dims.shard)
    if config.training.batch_size % (twice.data * config.training.micro_batch_size) == 0:
        meshes[f"--devices {twice.size} --parallel.shard {twice.shard}"] = twice
    return meshes


def _options(change: Change) -> str:
    """A change on the command line."""
    words = {key.removesuffix(".name"): f"{value}" for key, value in change.items()}
    return " ".join(f"--{key} {v.lower() if v in ('True', 'False') else v}" for key, v in words.items())


def _changed(config: Config, change: Change) -> Config:
    tables = config.model_dump()
    tables["recipe"] |= tables["recipe"].pop("places")
    for key, value in change.items():
        section, name = key.split(".")
        tables[section][name] = value
    return make_config(tables)
