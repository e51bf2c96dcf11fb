"""Runs the parts of ladder 2, one `narrowgauge compare` each: the designs of the pilot, or the stages.

    python experiments/ladder2.py pilot  --data corpora/ladder --out runs/ladder2 --seeds 1,2,3
    python experiments/ladder2.py stages --data corpora/ladder --out runs/ladder2

Finished runs are rows of docs/evidence/ladder2/FILE/PART.csv, and are not trained again: the same line
continues after a stop, on another machine as well. With `--seeds` all parts are done with one seed before
the next begins; without it each part has the seeds of its file. `make ladder2` turns the rows into
docs/evidence.md.
"""

import argparse
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from narrowgauge.system.files import write_whole
from narrowgauge.system.toml_text import toml_key, toml_value

HERE = Path(__file__).parent / "ladder2"
ROWS = Path(__file__).parents[1] / "docs" / "evidence" / "ladder2"


def main() -> None:
    """Run what is left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", choices=("pilot", "stages"))
    parser.add_argument("--data", default="corpora/ladder", help="tokens, from `narrowgauge prepare`")
    parser.add_argument("--out", type=Path, default=Path("runs/ladder2"), help="the directory of the runs")
    parser.add_argument("--seeds", default="", help="1,2 for seed after seed; the file's seeds if left out")
    parser.add_argument("--parts", default="", help="some of the parts; all if left out")
    options = parser.parse_args()
    parts = read_parts(options.file)
    chosen = [name for name in options.parts.split(",") if name] or list(parts)
    for seed in options.seeds.split(","):
        for name in chosen:
            rows = ROWS / options.file / f"{name}.csv"
            rows.parent.mkdir(parents=True, exist_ok=True)
            changes = {"data": {"source": options.data}, "experiment": {"rows": str(rows)}}
            if seed:
                changes["experiment"]["seeds"] = [int(seed)]
            out = options.out / options.file / name
            out.mkdir(parents=True, exist_ok=True)
            file = out.with_name(f"{name}{f'-seed-{seed}' if seed else ''}.toml")
            write_whole(file, _toml(merged(parts[name], changes)))
            command = [sys.executable, "-m", "narrowgauge", "compare", str(file), "--out", str(out)]
            subprocess.run(command, check=True)


def read_parts(file: str) -> dict[str, dict[str, Any]]:
    """The tables of each part of a file: those that all share, its own keys, and the arms that it trains."""
    shared = tomllib.loads((HERE / f"{file}.toml").read_text(encoding="utf-8"))
    parts = {name: merged(shared, keys) for name, keys in shared.pop("parts").items()}
    for tables in parts.values():
        if order := tables["experiment"].get("order"):
            tables["arms"] = {name: tables["arms"][name] for group in order for name in group}
    return parts


def merged(tables: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """Tables with other values of some keys."""
    both = {name: dict(table) for name, table in tables.items()}
    for name, table in keys.items():
        both[name] = {**both.get(name, {}), **table}
    return both


def _toml(tables: Mapping[str, Any]) -> str:
    """The tables as TOML, each key with its value on a line."""
    lines = []
    for section, table in tables.items():
        lines += [f"[{section}]", *(f"{toml_key(key)} = {toml_value(value)}" for key, value in table.items())]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
