"""Runs the steps of GitHub's workflows on this machine, as their files have them.

    python release/workflows.py [--only checks] [--matrix python=3.11] [--list] [--small]

Each `run:` step is a shell command with the job's matrix filled in. A job with a matrix runs once for each
combination that this machine can run: a Python that is not installed is named. `uses:` steps are GitHub's
own actions: they are named and not run. `--small` gives `make test` and `make test-thorough` one folder.
"""

import argparse
import itertools
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = ROOT / ".github" / "workflows"
_EXPRESSION = re.compile(r"\$\{\{\s*matrix\.(\w+)\s*\}\}")
_SMALL = {"make test ": "tests/test_home.py", "make test-thorough": "tests/forecast/test_law.py"}


def load(name: str) -> Mapping[str, Any]:
    """A workflow by the name of its file."""
    return dict(yaml.safe_load((WORKFLOWS / f"{name}.yml").read_text(encoding="utf-8")))


def combinations(job: Mapping[str, Any]) -> list[dict[str, str]]:
    """The combinations of a job's matrix; one empty one without a matrix."""
    matrix = dict(job.get("strategy", {}).get("matrix", {}))
    included = matrix.pop("include", [])
    products = itertools.product(*matrix.values()) if matrix else [()]
    return [*(dict(zip(matrix, values, strict=True)) for values in products), *included]


def fill(text: str, values: Mapping[str, str]) -> str:
    """A text with the values of a matrix in place.

    Raises:
        KeyError: The matrix has no such value.
    """
    return _EXPRESSION.sub(lambda found: values[found[1]], text)


def holds(condition: str, values: Mapping[str, str]) -> bool:
    """Whether a condition holds that compares values of the matrix with texts, joined by &&."""
    for part in filter(None, condition.split("&&")):
        found = re.fullmatch(r"\s*matrix\.(\w+) == '([^']*)'\s*", part)
        if found is None:
            raise ValueError(f"a condition that this script does not read: {condition}")
        if values[found[1]] != found[2]:
            return False
    return True


def runs(python: str) -> bool:
    """Whether an interpreter is here; a shim without one behind it has the name alone."""
    found = shutil.which(python)
    return bool(found) and subprocess.run([found, "--version"], capture_output=True).returncode == 0


def clean(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment without what `make` passes on, which would override the variables of the steps."""
    return {k: v for k, v in environment.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "ARGS")}


def steps(name: str) -> Iterator[tuple[str, Mapping[str, str], Mapping[str, Any]]]:
    """(job, values of the matrix, step) of a workflow, in order."""
    for job_name, job in load(name)["jobs"].items():
        for values in combinations(job):
            for step in job["steps"]:
                if holds(step.get("if", ""), values):
                    yield job_name, values, step


def main() -> None:
    """Runs, or lists."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", help="one workflow")
    parser.add_argument("--matrix", action="append", default=[], metavar="KEY=VALUE", help="only these")
    parser.add_argument("--list", action="store_true", help="print the steps, and run none")
    parser.add_argument("--small", action="store_true", help="a part of the tests")
    options = parser.parse_args()
    wanted = dict(item.split("=") for item in options.matrix)
    names = [options.only] if options.only else sorted(p.stem for p in WORKFLOWS.glob("*.yml"))
    failed, count = [], {"run": 0, "not run": 0}
    for name in names:
        for job, values, step in steps(name):
            if any(values.get(key, value) != value for key, value in wanted.items()):
                continue
            where = f"{name}/{job} {' '.join(values.values())}".rstrip()
            if "uses" in step:
                print(f"{where}: {step['uses']}: an action of GitHub's, not run")
                continue
            python = f"python{values['python']}" if "python" in values else "python3"
            command = fill(step["run"], values)
            if values:  # an environment for each combination: `make` keeps one that is there
                command += f" VENV=.venv-{'-'.join(values.values())}"
            reason = "" if runs(python) else f"no {python} here"
            if reason or options.list:
                count["not run"] += 1
                print(f"{where}: {command}: {f'not run, {reason}' if reason else 'listed'}", flush=True)
                continue
            small = next((v for k, v in _SMALL.items() if f"{command} ".startswith(k)), "")
            environment = clean(os.environ) | {"PYTHON": python}
            environment |= {"ARGS": small} if options.small and small else {}
            began = time.monotonic()
            done = subprocess.run(["bash", "-e", "-c", command], cwd=ROOT, env=environment)
            count["run"] += 1
            print(
                f"{where}: {command}: exit code {done.returncode} ({time.monotonic() - began:.0f} s)",
                flush=True,
            )
            failed += [where] if done.returncode else []
    print(f"{count['run']} steps run, {len(failed)} failed, {count['not run']} not run")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
