"""The default run directory: `runs/MODEL-SOURCE-RECIPE,key=value,...`.

The name includes each key that changes the trajectory and differs from the defaults of the model, source and
recipe, so another learning rate is another run:

    narrowgauge train                          runs/debug-stdlib-fp8
    narrowgauge train --lr 1e-3 --seed 3       runs/debug-stdlib-fp8,lr=0.001,seed=3

The name depends only on these values, so the same command line finds its run again. A run may have another
name, for instance if its values were changed by `--allow-change`. So an existing directory with the same stem
is taken if its configuration is this one.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.data import split_sources
from narrowgauge.trainer.models.sizes import CUSTOM
from narrowgauge.trainer.runs.run_directory import RunDirectory
from narrowgauge.trainer.training.config.config import Config, config_keys, make_config
from narrowgauge.trainer.training.config.diff import config_diff, trajectory

FOLDER = "runs"
LONGEST = 100  # characters of a name, all ASCII; file systems allow 255 bytes
_LONGEST_VALUE = 24
_IN_THE_NAME = ("model.name", "data.source", "recipe.name")


def default_out(config: Config, allowed: Sequence[str] = ()) -> Path:
    """Choose the run directory of a configuration: that of the run it continues, else a new one.

    `allowed` lists the keys in which the existing run may differ (`--allow-change`).
    """
    start = _start(config)
    named = Path(FOLDER) / _name(start, _changed(config))
    beside = {Path(FOLDER) / start, *Path(FOLDER).glob(f"{start},*")}
    changes: dict[Path, set[str]] = {}
    for path in filter(Path.is_dir, dict.fromkeys([named, *sorted(beside)])):
        with suppress(UserError):  # not a readable run
            changes[path] = set(config_diff(RunDirectory(path).config(), config))
    for path, diff in changes.items():
        if not diff:
            return path
    changed = [path for path, diff in changes.items() if diff <= set(allowed)]
    if len(changed) > 1 and named not in changed:
        raise UserError(
            f"--allow-change {','.join(allowed)} fits {len(changed)} runs ({', '.join(map(str, changed))}); "
            "name the one that is meant with --out"
        )
    return named if named in changed or not changed else changed[0]


def _start(config: Config) -> str:
    """Model, source and recipe, in characters that every file system and shell accepts."""
    sources = "+".join(filter(None, map(_stem, split_sources(config.data.source)))) or "data"
    name = f"{_safe(config.model.name)}-{sources}-{_safe(Path(config.recipe.name).stem)}"
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 9]}-{_digest(name)}"


def _stem(source: str) -> str:
    """The last part of a source that contains a letter: `texts` for `texts/*.md`."""
    return next(filter(None, (_safe(Path(part).stem) for part in Path(source).parts[::-1])), "")


def _name(start: str, changed: Mapping[str, Any]) -> str:
    """The start and the keys that differ; a digest of all keys if some do not fit or are abbreviated."""
    parts = [_part(key, value) for key, value in changed.items()]
    shown = ",".join([start, *(text for text, _ in parts)])
    if len(shown) <= LONGEST and all(is_whole for _, is_whole in parts):
        return shown
    end = f",{_digest(json.dumps(changed, sort_keys=True))}"
    name = start
    for text, _ in parts:
        if len(name) + 1 + len(text) + len(end) <= max(LONGEST, len(start) + len(end)):
            name += f",{text}"
    return name + end


def _changed(config: Config) -> dict[str, Any]:
    """The keys that change the trajectory and differ from the defaults of the model, source and recipe."""
    size = {"name": config.model.name} if config.model.name != CUSTOM else {}
    data, recipe = {"source": config.data.source}, {"name": config.recipe.name}
    base = make_config({"model": size, "data": data, "recipe": recipe})
    new = {f"{s}.{k}": v for s, table in trajectory(config).items() for k, v in table.items()}
    keys = [key for key in config_diff(base, config) if key not in _IN_THE_NAME]
    return {key: new.get(key) for key in keys}


def _part(key: str, value: Any) -> tuple[str, bool]:
    """`lr=0.001`, and whether it shows the whole value."""
    ending = key.partition(".")[2]
    is_shared = [other.partition(".")[2] for other in config_keys()].count(ending) > 1
    if isinstance(value, dict):
        return f"{key if is_shared else ending}={_safe(str(value.get('cast', 'table')))}", False
    values = value if isinstance(value, list) else [value]
    whole = "+".join(str(v).lower() if isinstance(v, bool) else str(v) for v in values)
    text = _safe(whole)[:_LONGEST_VALUE]
    return f"{key if is_shared else ending}={text}", text == whole


def _safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.+-]+", "-", text).strip("-.")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
