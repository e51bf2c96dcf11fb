"""A run directory: its files, and the rules for resuming in it.

    config.toml      the resolved configuration
    recipe.toml      the recipe's text when the run began; below a mark, what the guard has raised since
    tokenizer.json   the tokenizer of the run's tokens
    special_tokens.json   an imported model's tokens that begin and end a text
    metrics.jsonl    one object per step, and events
    gauges.jsonl     one object per layer and place, for the steps at which gauges were read
    probe.json, sensitivity.json   the last results of `narrowgauge probe` and `narrowgauge sensitivity`
    evaluation.json  two losses, with the run's forward pass and another (`narrowgauge eval --forward`)
    checkpoints/     published atomically
    report.html      one page
    status.json      {"status": ..., "reason": ...}
    identity.json    {"run_id": ...}, if the configuration was deliberately changed (`config.diff`)

A directory belongs to one configuration. Resuming with another is refused, except for keys that do not change
the trajectory (`config.diff`) and keys that are explicitly allowed.

A failed write of the metrics must not end a run. A checkpoint that cannot be written is lost work and is
reported as an error. A metrics line that cannot be written is kept in memory, with one warning, and written
together with the next line (`RunWriter`). A reader of the file sees complete lines in order; a gap is filled
later.

A directory that disappears is another matter. An unmounted network disk leaves its empty mount point, and
writes under the old path would fill another disk. So the directory is identified by device and inode, and a
save into a different one is refused.
"""

import hashlib
import json
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from errno import ENOENT
from pathlib import Path
from typing import Any

import torch

from narrowgauge.system.errors import UserError
from narrowgauge.system.files import make_directory, write_whole
from narrowgauge.system.json_lines import append_lines, bytes_until_step, read_jsonl
from narrowgauge.system.toml_text import parse_toml
from narrowgauge.trainer.checkpoint.interop.safetensors_reader import read_json
from narrowgauge.trainer.runs.choices import RAISED
from narrowgauge.trainer.runs.monitor.loggers import Loggers
from narrowgauge.trainer.training.config.config import Config, make_config, without_gone
from narrowgauge.trainer.training.config.diff import (
    TORCH,
    ConfigDiff,
    config_diff,
    require_allowed,
    to_toml,
    trajectory,
)

SPECIAL_TOKENS = "special_tokens.json"
PROBE = "probe.json"
SENSITIVITY = "sensitivity.json"
EVALUATION = "evaluation.json"
_MICRO_BATCH = "training.micro_batch_size"
_DIVERGED = ("Diverged", "PoisonedError")  # errors, with which the reason of a failure begins


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The files of one run."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """The directory of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """The record of steps and events."""
        return self.path / "metrics.jsonl"

    @property
    def gauges(self) -> Path:
        """The gauge readings."""
        return self.path / "gauges.jsonl"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer of the run's tokens."""
        return self.path / "tokenizer.json"

    def special_tokens(self) -> dict[str, Any]:
        """The special tokens of an imported model's files; {} for any other run."""
        file = self.path / SPECIAL_TOKENS
        return read_json(file) if file.is_file() else {}

    def keep_special_tokens(self, tokens: Mapping[str, Any]) -> None:
        """Write the special tokens, if there are any."""
        if tokens:
            write_whole(self.path / SPECIAL_TOKENS, json.dumps(tokens, indent=2) + "\n")

    def record(self, line: Mapping[str, Any]) -> None:
        """Append one line to the metrics."""
        append_lines(self.metrics, [line])

    def keep_metrics_until(self, step: int, rollbacks: int | None = None) -> None:
        """Drop the lines of steps after `step`, which will be repeated.

        `rollbacks` is the number of rollback events to keep; None for all events of the kept steps.
        """
        if lines := self.lines():
            lines = [line for line in lines if is_settled(line, step, rollbacks)]
            write_whole(self.metrics, "".join(json.dumps(line) + "\n" for line in lines))
        if self.gauges.exists():
            os.truncate(self.gauges, bytes_until_step(self.gauges, step))

    def recipe_text(self) -> str:
        """The recipe's text when the run began; "" if there is none."""
        file = self.path / "recipe.toml"
        return file.read_text(encoding="utf-8").partition(RAISED)[0] if file.exists() else ""

    def record_rules(self, rules: Sequence[str]) -> None:
        """Write rules, each as TOML, below the recipe's text."""
        file, text = self.path / "recipe.toml", self.recipe_text()
        if rules:
            added = "\n".join(rules)
            try:
                tomllib.loads(text + added)
            except tomllib.TOMLDecodeError:  # the recipe's rules are an array in one line
                added = "".join(f"# {line}\n" for line in added.splitlines())
            text += f"{RAISED}\n{added}"
        if file.exists() and file.read_text(encoding="utf-8") != text:
            write_whole(file, text)

    def set_status(self, status: str, reason: str) -> None:
        """Write the status (running, done, preempted or failed), its reason, and whether the run diverged."""
        said = {"status": status, "reason": reason, "diverged": reason.startswith(_DIVERGED)}
        write_whole(self.path / "status.json", json.dumps(said) + "\n")

    def status(self) -> str:
        """The last status that was set; "" in a new directory."""
        try:
            return str(json.loads((self.path / "status.json").read_text())["status"])
        except (OSError, ValueError, KeyError):
            return ""

    def config(self, own_recipe: bool = False) -> Config:
        """Read the configuration of the run.

        `own_recipe` uses the run's copy of a user's recipe file, since the file may have changed.
        """
        file = self.path / "config.toml"
        try:
            values = without_gone(tomllib.loads(file.read_text(encoding="utf-8")))
            section = values.get("recipe")
            if own_recipe and isinstance(section, dict) and str(section.get("name")).endswith(".toml"):
                section["name"] = str(self.path / "recipe.toml")
            return make_config(values)
        except FileNotFoundError:
            raise UserError(
                f"{self.path} is not a run directory: it has no config.toml; name a directory that "
                "'narrowgauge train --out' made"
            ) from None
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise UserError(
                f"{file} cannot be read: {error}; restore it, or start with another --out"
            ) from None

    def micro_batch_size(self) -> int:
        """The number of sequences that the run computes at once; 0 if no run has begun."""
        try:
            is_begun = (self.path / "config.toml").exists()
        except OSError:  # `claim` reports that it cannot be written
            return 0
        return self.config().training.micro_batch_size if is_begun else 0

    def claim(self, config: Config, allowed: Sequence[str] = ()) -> ConfigDiff:
        """Initialize the directory for a configuration, or check that it belongs to that configuration.

        Returns the differences, all in keys of `allowed`. Nothing is changed yet; see `adopt`.
        """
        try:
            make_directory(self.path)
            if not (self.path / "config.toml").exists():
                foreign = [p.name for p in self.path.iterdir() if not p.name.startswith(".")]
                if foreign and foreign != ["recipe.toml"]:
                    raise UserError(
                        f"{self.path} holds {foreign[0]!r} and no config.toml, so it is not a run directory; "
                        "name a new directory with --out"
                    )
                write_whole(self.path / "recipe.toml", config.spec.recipe.text)
                write_whole(self.path / "config.toml", to_toml(config))
                return {}
        except OSError as error:
            raise UserError(
                f"the run directory {self.path} cannot be written: {error.strerror}; "
                "name another with --out, or fix its permissions"
            ) from None
        changes = self.changes(config)
        require_allowed(self.path, changes, allowed)
        return changes

    def changes(self, config: Config) -> ConfigDiff:
        """Every key in which a configuration differs from that of the run that began here."""
        changes = config_diff(self.config(), config)
        if parse_toml(self.recipe_text(), "recipe.toml") != parse_toml(config.spec.recipe.text, "the recipe"):
            changes.setdefault("recipe.name", (config.recipe.name, config.recipe.name))
        if config.training.fit_micro_batch:  # chosen, not set; recorded in `adopt`
            changes.pop(_MICRO_BATCH, None)
        if (version := self.last("torch", torch.__version__)) != torch.__version__:
            changes[TORCH] = version, torch.__version__
        return changes

    def adopt(self, config: Config, changes: ConfigDiff, digest: str, step: int, run_id: str) -> None:
        """Record and apply the changes that `claim` and `check_corpus` allowed, from `step` on.

        `run_id` is the id in the checkpoints and does not change, even if the text was changed before the
        first checkpoint and the line with the digest of the old text has been dropped.
        """
        changes = dict(changes)
        if (recorded := self.corpus_digest()) not in ("", digest):
            changes["corpus"] = recorded, digest
        before, size = self.micro_batch_size(), config.training.micro_batch_size
        if size != before:
            changes[_MICRO_BATCH] = before, size
        if changes or self.run_id(digest) != run_id:
            write_whole(self.path / "identity.json", json.dumps({"run_id": run_id}) + "\n")
        if not changes:
            return
        self.record({"event": "change", "step": step, "changes": {k: list(v) for k, v in changes.items()}})
        write_whole(self.path / "recipe.toml", config.spec.recipe.text)
        write_whole(self.path / "config.toml", to_toml(config))

    def run_id(self, digest: str) -> str:
        """The run's id in its checkpoints; derived from the corpus digest if the run has not recorded one."""
        try:
            return str(json.loads((self.path / "identity.json").read_text())["run_id"])
        except FileNotFoundError:
            return run_id_of(self.config(), self.corpus_digest() or digest)
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"{self.path / 'identity.json'} cannot be read: {error}; restore it") from None

    def check_corpus(self, digest: str, allowed: Sequence[str] = ()) -> None:
        """Check that the corpus is the one with which the run began, unless `allowed` has one of its keys."""
        recorded = self.corpus_digest()
        if recorded and recorded != digest and not {"data.source", "data.tokenizer"} & set(allowed):
            raise UserError(
                f"{self.path} was trained on corpus {recorded[:12]}..., and data.source with data.tokenizer "
                f"is now {digest[:12]}...; restore text and tokenizer, let them through with --allow-change "
                "data.source, or start a new run with another --out"
            )

    def corpus_digest(self) -> str:
        """The recorded digest of the corpus; "" before the first start."""
        return str(self.last("corpus", ""))

    def last(self, key: str, otherwise: Any) -> Any:
        """The last recorded value of a key of the metrics."""
        return next((line[key] for line in reversed(self.lines()) if key in line), otherwise)

    def lines(self) -> list[dict[str, Any]]:
        """All lines of the metrics."""
        return read_jsonl(self.metrics) if self.metrics.exists() else []


def run_id_of(config: Config, corpus_digest: str) -> str:
    """The run id of a configuration and corpus: a digest that a checkpoint must match to be resumed."""
    text = json.dumps([trajectory(config), corpus_digest], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_settled(line: Mapping[str, Any], step: int, rollbacks: int | None = None) -> bool:
    """Whether a line remains valid when the run continues after `step`; a `done` event never does."""
    if line.get("event") == "rollback" and rollbacks is not None and line["rollbacks"] > rollbacks:
        return False
    return line.get("step", 0) <= step and line.get("event") != "done"


_MOST = 100_000  # lines of a file kept in memory; beyond that the oldest are dropped


@dataclass(frozen=True)
class RunWriter(RunDirectory):
    """A run directory that keeps lines in memory while the disk rejects them."""

    log: Callable[[str], None]  # prints the warning
    waiting: dict[Path, list[Mapping[str, Any]]] = field(default_factory=dict)  # lines not yet written
    identity: list[int] = field(default_factory=list)  # device and inode at the start
    sinks: Loggers = field(default_factory=Loggers)  # receive a copy of metrics and gauges once

    def __post_init__(self) -> None:
        self.identity.extend(_identity(self.path))

    def record(self, line: Mapping[str, Any]) -> None:
        """Append one line to the metrics, at once or when the disk accepts it."""
        self._append(self.metrics, [line])
        self.sinks.metrics(line)

    def record_gauges(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Append the gauge readings of a step, at once or when the disk accepts them."""
        lines = list(lines)
        self._append(self.gauges, lines)
        self.sinks.gauges(lines)

    def sync_metrics(self) -> None:
        """Flush metrics and gauges to the disk, before a checkpoint of their step is published.

        An error only causes a warning.
        """
        self.flush()
        try:
            for path in filter(Path.exists, (self.metrics, self.gauges)):
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        except OSError as error:
            self._warn(self.metrics, error)

    def keep_metrics_until(self, step: int, rollbacks: int | None = None) -> None:
        """Drop the lines of steps after `step`, including those not yet written."""
        self.flush()
        super().keep_metrics_until(step, rollbacks)

    def flush(self) -> None:
        """Try to write the waiting lines."""
        for file in list(self.waiting):
            self._append(file, [])

    def require_there(self) -> None:
        """Check that the path is still the directory in which the run began, and no other in its place."""
        if _identity(self.path) != self.identity:
            raise FileNotFoundError(
                ENOENT, "the run directory is gone, and another one is in its place", str(self.path)
            )

    def _append(self, file: Path, lines: Iterable[Mapping[str, Any]]) -> None:
        all_lines = [*self.waiting.get(file, []), *lines]
        try:
            self.require_there()
            append_lines(file, all_lines)
        except OSError as error:
            self._warn(file, error)
            self.waiting[file] = all_lines[-_MOST:]
        else:
            self.waiting.pop(file, None)

    def _warn(self, file: Path, error: OSError) -> None:
        """Log a warning once, until writing succeeds again."""
        if not self.waiting:
            reason = error.strerror or str(error)
            self.log(f"NOT RECORDED: {file} cannot be written ({reason}); training continues, and lines wait")


def _nothing(*_: Any, **__: Any) -> Any:
    """Do nothing: rank 0 does it."""


class NullRunWriter(RunWriter):
    """The run directory on ranks other than 0, which read but do not write."""

    record = record_gauges = sync_metrics = keep_metrics_until = _nothing
    record_rules = set_status = adopt = _nothing


def _identity(path: Path) -> list[int]:
    """Device and inode of a path that exists."""
    stat = os.stat(path)
    return [stat.st_dev, stat.st_ino]
