"""Runs the reproductions of faults in other libraries: `python conformance/found.py [LIBRARY ...]`.

`found/LIBRARY-WHAT.py` is one: its docstring names the fault, the sentence that requires something else and
the line of code; its last lines, after `# prints:`, are what it prints. `page.py` lists them.
"""

import argparse
import ast
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
SAYS = "# prints:\n"


class Reproduction(NamedTuple):
    """A library, ten lines of Python, and what they print."""

    library: str
    code: str
    prints: str


def reproductions() -> list[Reproduction]:
    """All of them, in the order of their names."""
    found = []
    for path in sorted((HERE / "found").glob("*.py")):
        code, _, printed = path.read_text(encoding="utf-8").partition(SAYS)
        lines = [line.removeprefix("#   ") for line in printed.splitlines(keepends=True)]
        found.append(Reproduction(path.stem.partition("-")[0], code, "".join(lines)))
    return found


def run(one: Reproduction, environments: Path | None = None) -> str:
    """What a reproduction prints; if it fails, the last line of its error."""
    own = environments / one.library / "bin" / "python" if environments else Path()
    python = str(own) if environments and own.exists() else sys.executable
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "reproduction.py"  # a kernel of Triton has to lie in a file
        file.write_text(one.code, encoding="utf-8")
        words = [python, "-W", "ignore", str(file)]
        given = os.environ | {"TMPDIR": folder}
        done = subprocess.run(words, capture_output=True, text=True, cwd=HERE.parent, env=given)
    if done.returncode:
        return (done.stderr.strip().splitlines() or [""])[-1]
    return "".join(f"{s}\n" for s in done.stdout.splitlines() if not s.startswith(("{'train", "\x1b")) and s)


def table() -> str:
    """A row of Markdown for each reproduction."""
    rows = ["| fault | reproduction |", "|---|---|"]
    for path in sorted((HERE / "found").glob("*.py")):
        said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        rows.append(f"| {said.splitlines()[0].rstrip('.')} | `{path.name}` |")
    return "\n".join(rows)


def main() -> int:
    """Run them; 1 if one prints something else."""
    parser = argparse.ArgumentParser(description="run the reproductions of docs/conformance.md")
    parser.add_argument("libraries", nargs="*", metavar="LIBRARY")
    parser.add_argument("--environments", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    wrong = 0
    for one in reproductions():
        if options.libraries and one.library not in options.libraries:
            continue
        printed = run(one, options.environments)
        wrong += printed != one.prints
        print(
            f"{one.library:20}", "as written" if printed == one.prints else f"printed\n{printed}", flush=True
        )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
