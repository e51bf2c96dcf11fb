"""Runs the pilot of ladder 2: every design of experiments/pilot.toml with every seed, one `compare` each.

    python experiments/pilot.py --data corpora/ladder --out runs/pilot [--seeds 1,2,3] [--designs A,B]

A seed is finished for all designs before the next begins, so a pilot that is stopped has compared its
designs on equal terms. Finished runs are rows of docs/evidence/ladder2/pilot/DESIGN.csv. The same line
continues there, on another machine as well. `make ladder2` turns the rows into docs/ladder2.md.
"""

import argparse
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from narrowgauge.files import write_whole
from narrowgauge.toml_text import toml_key, toml_value

FILE = Path(__file__).parent / "pilot.toml"
ROWS = Path(__file__).parents[1] / "docs" / "evidence" / "ladder2" / "pilot"


def main() -> None:
    """Run what is left of the pilot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", default="corpora/ladder", help="tokens, from `narrowgauge prepare`")
    parser.add_argument("--out", type=Path, default=Path("runs/pilot"), help="the directory of the runs")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--designs", default="", help="some of those in pilot.toml; all if left out")
    options = parser.parse_args()
    designs = read_designs()
    chosen = [name for name in options.designs.split(",") if name] or list(designs)
    for seed in map(int, options.seeds.split(",")):
        for name in chosen:
            file = options.out / f"{name}-seed-{seed}.toml"
            experiment = {"seeds": [seed], "rows": str(ROWS / f"{name}.csv")}
            changes = {"data": {"source": options.data}, "experiment": experiment}
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, _toml(merged(designs[name], changes)))
            command = [sys.executable, "-m", "narrowgauge", "compare", str(file)]
            subprocess.run([*command, "--out", str(options.out / name)], check=True)


def read_designs() -> dict[str, dict[str, Any]]:
    """The tables of each design: those that all share, and its own keys."""
    shared = tomllib.loads(FILE.read_text(encoding="utf-8"))
    designs = shared.pop("designs")
    return {name: merged(shared, keys) for name, keys in designs.items()}


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
