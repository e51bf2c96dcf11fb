"""Tests the plugs against the packages of this environment, and writes docs/versions.md.

    python release/versions.py test [TOOL ...]             the tools that are installed here, by their tests
    python release/versions.py note TOOL VERSION REASON    a version that was not tested, and why
    python release/versions.py page                        the page alone

A result is a row of docs/versions.csv, which holds the newest for each tool, its version, torch and Python.
The page is made of these rows.
"""

import argparse
import csv
import importlib.metadata
import platform
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROWS, PAGE = ROOT / "docs" / "versions.csv", ROOT / "docs" / "versions.md"
COLUMNS = ("tool", "version", "torch", "python", "passed", "skipped", "failed", "date", "note")
#: The tests of each tool, and what selects the ones that need it.
TESTS = {
    "torch": ("tests/formats", "tests/nn/test_linear.py"),
    "transformers": ("tests/integrations/test_transformers.py",),
    "trl": ("tests/integrations/test_transformers.py", "-k", "trls"),
    "lightning": ("tests/integrations/test_lightning.py",),
    "torchao": ("tests/integrations/test_torchao.py", "tests/recipes/test_writing.py", "-k", "torchao"),
    "axolotl": ("tests/integrations/test_axolotl.py",),
    "torchtitan": ("tests/integrations/test_torchtitan.py",),
}
HEAD = """\
# Versions

The versions of other packages that the tests ran with. `make versions` runs the tests of each tool that is
installed in `.venv`, and writes this page from `docs/versions.csv`. A version that was not
tested has the reason in place of figures.

"""


def installed(package: str) -> str:
    """The version of a package in this environment; "" if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def tested(tool: str) -> dict[str, str]:
    """The row of a tool's tests in this environment."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-m", "", f"--junitxml={report}"]
        print("$", " ".join([*command[1:5], *TESTS[tool]]), flush=True)
        subprocess.run([*command, *TESTS[tool]], cwd=ROOT)
        suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    counts = {
        key: sum(int(s.get(key, 0)) for s in suites) for key in ("tests", "skipped", "failures", "errors")
    }
    failed = counts["failures"] + counts["errors"]
    return {
        "tool": tool,
        "version": installed(tool).partition("+")[0],
        "torch": installed("torch").partition("+")[0],
        "python": platform.python_version(),
        "passed": str(counts["tests"] - counts["skipped"] - failed),
        "skipped": str(counts["skipped"]),
        "failed": str(failed),
        "date": date.today().isoformat(),
        "note": "",
    }


def read() -> list[dict[str, str]]:
    """The rows so far."""
    if not ROWS.is_file():
        return []
    with ROWS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def keep(new: Iterable[dict[str, str]]) -> list[dict[str, str]]:
    """Writes rows, replacing rows of the same versions, and returns all.

    A result takes the place of the reason why its version was not tested.
    """
    by_key = {tuple(row[key] for key in COLUMNS[:4]): row for row in (*read(), *new)}
    for tool, version in {(tool, version) for tool, version, torch, _ in by_key if torch}:
        by_key.pop((tool, version, "", ""), None)
    order = list(TESTS)

    def place(row: dict[str, str]) -> tuple[int, list[int], list[int]]:
        numbers = [[int(n) for n in row[k].split(".") if n.isdecimal()] for k in ("version", "torch")]
        return order.index(row["tool"]), numbers[0], numbers[1]

    rows = sorted(by_key.values(), key=place)
    with ROWS.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return rows


def page(rows: Iterable[dict[str, str]]) -> str:
    """The page: a line for each row."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = ["| tool | version | torch | Python | tests | date |", "|---|---|---|---|---|---|"]
    for row in rows:
        counts = f"{row['passed']} passed"
        counts += f", {row['skipped']} skipped" if int(row["skipped"] or 0) else ""
        counts += f", **{row['failed']} failed**" if int(row["failed"] or 0) else ""
        said = f"not tested: {row['note']}" if row["note"] else counts
        cells = (row["tool"], row["version"], row["torch"], row["python"], said, row["date"])
        lines.append(f"| {' | '.join(cells)} |")
    ranges: dict[str, list[str]] = {}
    for extra, needs in {"": extras["dependencies"], **extras["optional-dependencies"]}.items():
        for need in needs:
            if need.startswith(tuple(f"{tool}{sign}" for tool in TESTS for sign in "<>")):
                ranges.setdefault(need, []).append(extra)
    allowed = ", ".join(f"`{p}`{_of_extras(names)}" for p, names in sorted(ranges.items()))
    return HEAD + "\n".join(lines) + f"\n\n`pyproject.toml` allows {allowed}.\n"


def _of_extras(names: list[str]) -> str:
    """The extras that have a requirement; "" for one of the package itself."""
    return "" if "" in names else f" ({', '.join(f'`{name}`' for name in sorted(names))})"


def main() -> None:
    """Tests, notes, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("test").add_argument("tools", nargs="*", metavar="TOOL", choices=[*TESTS, []])
    note = commands.add_parser("note")
    for name in ("tool", "version", "reason"):
        note.add_argument(name)
    commands.add_parser("page")
    options = parser.parse_args()
    rows: list[dict[str, str]] = []
    if options.command == "test":
        rows = [tested(tool) for tool in options.tools or TESTS if installed(tool)]
    elif options.command == "note":
        row = dict.fromkeys(COLUMNS, "") | {"tool": options.tool, "version": options.version}
        rows = [row | {"date": date.today().isoformat(), "note": options.reason}]
    PAGE.write_text(page(keep(rows)), encoding="utf-8")
    if any(int(row["failed"] or 0) for row in rows):
        sys.exit("a plug fails; docs/versions.md has the table")


if __name__ == "__main__":
    main()
