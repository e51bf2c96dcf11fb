"""Runs the reproductions of docs/found-in-others.md: `python conformance/found.py [LIBRARY ...]`.

A block of Python after a line `<!-- runs in: LIBRARY -->` runs in that library's environment, and has to
print the block of text that follows.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parent.parent / "docs" / "found-in-others.md"
BLOCK = re.compile(r"<!-- runs in: (\w+) -->\n```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)


class Reproduction(NamedTuple):
    """A library, ten lines of Python, and what they print."""

    library: str
    code: str
    prints: str


def reproductions() -> list[Reproduction]:
    """The page's faults, in its order."""
    return [Reproduction(*found) for found in BLOCK.findall(PAGE.read_text(encoding="utf-8"))]


def run(one: Reproduction, environments: Path | None = None) -> str:
    """What a reproduction prints; if it fails, the last line of its error."""
    own = environments / one.library / "bin" / "python" if environments else Path()
    python = str(own) if environments and own.exists() else sys.executable
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "reproduction.py"  # a kernel of Triton has to lie in a file
        file.write_text(one.code, encoding="utf-8")
        words = [python, "-W", "ignore", str(file)]
        given = os.environ | {"TMPDIR": folder}
        done = subprocess.run(words, capture_output=True, text=True, cwd=PAGE.parent.parent, env=given)
    if done.returncode:
        return (done.stderr.strip().splitlines() or [""])[-1]
    return "".join(f"{s}\n" for s in done.stdout.splitlines() if not s.startswith(("{'train", "\x1b")) and s)


def main() -> int:
    """Run them; 1 if one prints something else."""
    parser = argparse.ArgumentParser(description="run the reproductions of docs/found-in-others.md")
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
