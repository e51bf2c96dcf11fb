"""A run directory: what is in it, and the rules for coming back to it.

    config.toml      everything, resolved
    recipe.toml      the recipe's text, as it was when the run began
    tokenizer.json   the tokenizer of its tokens
    metrics.jsonl    one object a step, and events
    gauges.jsonl     one object a layer and place, of the steps that were read
    checkpoints/     published whole or not at all
    report.html      one page
    status.json      {"status": ..., "reason": ...}
    identity.json    {"run_id": ...}, where the configuration was changed on purpose (`changes`)

A directory belongs to one configuration. Coming back with another is refused, except for keys that do not
move the trajectory (`config.trajectory`), and for those that are let through by name.
"""

import hashlib
import json
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from narrowgauge.errors import UserError
from narrowgauge.files import make_directory, write_whole
from narrowgauge.json_lines import append_lines, read_jsonl
from narrowgauge.training.config.config import Config, make_config, to_toml, trajectory
from narrowgauge.training.config.diff import TORCH, ConfigDiff, config_diff, require_allowed


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The files of one run."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """Where steps are published."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """The record of steps and events."""
        return self.path / "metrics.jsonl"

    @property
    def gauges(self) -> Path:
        """What the gauges read."""
        return self.path / "gauges.jsonl"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer that turns the run's tokens into text."""
        return self.path / "tokenizer.json"

    def record(self, line: Mapping[str, Any]) -> None:
        """Append one line to the metrics."""
        append_lines(self.metrics, [line])

    def record_gauges(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Append what the gauges read in a step."""
        append_lines(self.gauges, lines)

    def sync_metrics(self) -> None:
        """Put the metrics on the disk, before a checkpoint claims their steps."""
        for path in (self.metrics, self.gauges):
            if path.exists():
                with path.open("rb") as file:
                    os.fsync(file.fileno())

    def keep_metrics_until(self, step: int, rollbacks: int | None = None) -> None:
        """Drop the lines of steps after `step`: they are about to be done again.

        So are all but the first `rollbacks` times that the run went back, where that is given.
        """
        if lines := self.lines():
            lines = [line for line in lines if is_settled(line, step, rollbacks)]
            write_whole(self.metrics, "".join(json.dumps(line) + "\n" for line in lines))
        if self.gauges.exists():
            os.truncate(self.gauges, _bytes_until(self.gauges, step))

    def set_status(self, status: str, reason: str) -> None:
        """running | done | preempted | failed, and why."""
        write_whole(self.path / "status.json", json.dumps({"status": status, "reason": reason}) + "\n")

    def status(self) -> str:
        """The last status that was set, or "" in a new directory."""
        try:
            return str(json.loads((self.path / "status.json").read_text())["status"])
        except (OSError, ValueError, KeyError):
            return ""

    def config(self, own_recipe: bool = False) -> Config:
        """The configuration the run was made with; `own_recipe`: with the run's copy of a user's recipe file,
        which may have been changed or moved since.

        Raises:
            UserError: this is no run directory, or its configuration is damaged.
        """
        file = self.path / "config.toml"
        try:
            values = tomllib.loads(file.read_text(encoding="utf-8"))
            section = values.get("recipe")
            if own_recipe and isinstance(section, dict) and str(section.get("name")).endswith(".toml"):
                section["name"] = str(self.path / "recipe.toml")
            return make_config(values)
        except FileNotFoundError:
            raise UserError(
                f"{self.path} is no run directory: it has no config.toml; name a directory that "
                "'narrowgauge train --out' made"
            ) from None
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise UserError(
                f"{file} cannot be read: {error}; restore it, or start with another --out"
            ) from None

    def claim(self, config: Config, allowed: Sequence[str] = ()) -> ConfigDiff:
        """Make the directory this configuration's, or check that it is.

        Returns:
            What is another value there: only keys in `allowed`. Nothing is changed yet; see `adopt`.

        Raises:
            UserError: it holds a run of another configuration, other files, or cannot be written.
        """
        recipe_text = config.resolved_recipe().text
        try:
            make_directory(self.path)
            if not (self.path / "config.toml").exists():
                foreign = [p.name for p in self.path.iterdir() if not p.name.startswith(".")]
                if foreign and foreign != ["recipe.toml"]:
                    raise UserError(
                        f"{self.path} holds {foreign[0]!r} and no config.toml, so it is no run directory; "
                        "name a new directory with --out"
                    )
                write_whole(self.path / "recipe.toml", recipe_text)
                write_whole(self.path / "config.toml", to_toml(config))
                return {}
        except OSError as error:
            raise UserError(
                f"the run directory {self.path} cannot be written: {error.strerror}; "
                "name another with --out, or mend its permissions"
            ) from None
        changes = config_diff(self.config(), config)
        recipe_there = self.path / "recipe.toml"
        if not recipe_there.exists() or recipe_there.read_text(encoding="utf-8") != recipe_text:
            changes.setdefault("recipe.name", (config.recipe.name, config.recipe.name))
        told = [str(line["torch"]) for line in self.lines() if "torch" in line]
        if told and told[-1] != torch.__version__:
            changes[TORCH] = told[-1], torch.__version__
        require_allowed(self.path, changes, allowed)
        return changes

    def adopt(self, config: Config, changes: ConfigDiff, digest: str, step: int) -> None:
        """Make what `claim` and `check_corpus` have let through the run's own, from `step` on."""
        told = self.corpus_digest()
        changes = {**changes, **({"corpus": (told, digest)} if told not in ("", digest) else {})}
        if not changes:
            return
        if not (identity := self.path / "identity.json").exists():
            write_whole(identity, json.dumps({"run_id": self.run_id(digest)}) + "\n")
        self.record({"event": "change", "step": step, "changes": {k: list(v) for k, v in changes.items()}})
        write_whole(self.path / "recipe.toml", config.resolved_recipe().text)
        write_whole(self.path / "config.toml", to_toml(config))

    def run_id(self, digest: str) -> str:
        """What this run's checkpoints are known by; `digest` is that of the corpus, if it has none yet."""
        try:
            return str(json.loads((self.path / "identity.json").read_text())["run_id"])
        except FileNotFoundError:
            return run_id_of(self.config(), self.corpus_digest() or digest)
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"{self.path / 'identity.json'} cannot be read: {error}; restore it") from None

    def check_corpus(self, digest: str, allowed: Sequence[str] = ()) -> None:
        """Refuse a corpus that is not the one the run has begun with, unless `allowed` names a key of it.

        Raises:
            UserError: the text or the tokenizer changed since.
        """
        told = self.corpus_digest()
        if told and told != digest and not {"data.source", "data.tokenizer"} & set(allowed):
            raise UserError(
                f"{self.path} was trained on corpus {told[:12]}..., and data.source with data.tokenizer "
                f"is now {digest[:12]}...; restore text and tokenizer, let them through with --allow-change "
                "data.source, or start a new run with another --out"
            )

    def corpus_digest(self) -> str:
        """Of the corpus that the run was trained on; "" before its first start."""
        told = [str(line["corpus"]) for line in self.lines() if "corpus" in line]
        return told[-1] if told else ""

    def lines(self) -> list[dict[str, Any]]:
        """What was recorded."""
        return read_jsonl(self.metrics) if self.metrics.exists() else []


def run_id_of(config: Config, corpus_digest: str) -> str:
    """What a checkpoint has to be of, to be continued under a configuration."""
    text = json.dumps([trajectory(config), corpus_digest], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_settled(line: Mapping[str, Any], step: int, rollbacks: int | None = None) -> bool:
    """Whether a line still holds when the run goes on after `step`; its end is then yet to come."""
    if line.get("event") == "rollback" and rollbacks is not None and line["rollbacks"] > rollbacks:
        return False
    return line.get("step", 0) <= step and line.get("event") != "done"


def _bytes_until(path: Path, step: int) -> int:
    """Where the lines of steps after `step` begin, or a torn line; steps stand in their order."""
    size = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                if not line.endswith(b"\n") or json.loads(line)["step"] > step:
                    break
            except (ValueError, KeyError, TypeError):
                raise UserError(
                    f"{path}:{number}: every line must be an object with a step, and this one is not; "
                    "mend or delete that line, or the file"
                ) from None
            size += len(line)
    return size
