"""Makes the golden files again: `python tests/golden/make.py [PART ...]`; no PART = all of them.

`test_golden.py` holds the project to these files, digit for digit. A change of the code's shape changes none
of them. Make them again only

- after a change that is meant to change digits (a rounding, an order of sums, a default), a file or a text:
  say in the commit which recipes changed and why, and read the diff line by line, as code is read: a line
  that changed without a reason is a mistake that was just found;
- after a new recipe, which adds lines and changes none;
- with another version of torch, once the project moves to it: from a commit whose test passed with the old
  one, and in a commit that does nothing else.

Never because a test fails and one does not know why. The digits hold for one arithmetic, which a fingerprint
next to them identifies: on a machine that computes otherwise the test compares losses and norms in bounds and
reports it in the last lines of pytest. `bounds` measures these: the same runs with other instructions of the
CPU and other libraries under the matmuls. Both need an x86-64 CPU with AVX2; the other instructions of
`bounds` AVX-512.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from golden import cells, export_page, outputs, page, resolved
from golden.runs import PINS, Worker, kept_file, read_kept, worker

# Other arithmetic: what each variable is set to, and in what bf16 operands are multiplied (none:
# as the run chooses; "": as the CPU can).
OTHERS: dict[str, tuple[dict[str, str], str | None]] = {
    "no AVX2": ({"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}, None),
    "AVX2": ({"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2"}, None),
    "AVX2, oneDNN": ({"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}, ""),
    "AVX-512": ({"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, ""),
    "all it has": ({}, ""),
}


def take_all(process: Worker, products: str | None = None) -> dict[str, cells.Cell]:
    """The digits of all runs."""
    taken = {}
    for name in cells.RUNS:
        taken[name] = cells.take(process, name, products)
    return taken


def bounds() -> None:
    """Keeps by how much at most each recipe's digits differ with other arithmetic, times `MARGIN`."""
    kept: dict[str, cells.Cell] = read_kept("digits")["runs"]
    found: dict[str, dict[str, float]] = {}
    for what, (variables, products) in OTHERS.items():
        pins = {k: v for k, v in PINS.items() if not k.startswith(("ATEN", "MKL_CBWR", "ONEDNN"))} | variables
        with tempfile.TemporaryDirectory() as directory, worker(Path(directory), pins) as process:
            for name, now in take_all(process, products).items():
                for figure, change in cells.changes(kept[name], now).items():
                    print(what, name, figure, f"{change:.2g}", sep="\t")
                    most = found.setdefault(cells.RUNS[name].recipe, {})
                    most[figure] = max(change, most.get(figure, 0.0))
    write(
        "bounds",
        {
            recipe: {f: float(f"{max(cells.FLOOR, cells.MARGIN * c):.1e}") for f, c in most.items()}
            for recipe, most in found.items()
        },
    )


def parts(names: list[str]) -> None:
    """Keeps digits with the fingerprint of their arithmetic, and what else the command line writes."""
    with tempfile.TemporaryDirectory() as directory, worker(Path(directory)) as process:
        (arithmetic,) = process({"fingerprint": True})
        for name in names:
            if name == "digits":
                write(name, {"arithmetic": arithmetic, "runs": take_all(process)})
            elif name not in OF_NO_DIGIT and arithmetic != read_kept("digits")["arithmetic"]:
                sys.exit("the arithmetic here is not that of the digits that are kept: make these first")
            else:
                write(name, outputs.OUTPUTS[name](process))


def write(name: str, what: Any) -> None:
    """Keeps JSON, one value a line."""
    file = kept_file(name)
    file.write_text(json.dumps(what, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(file)


OF_NO_DIGIT = ("plans", "words")
PARTS = ["digits", *outputs.OUTPUTS, "bounds", "resolved", "page"]

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; none: all")
    asked = parser.parse_args().parts or PARTS
    if unknown := set(asked) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    if "resolved" in asked:  # follows from no digit
        resolved.write()
    if "page" in asked:
        page.write()
        export_page.write()
    if of_digits := [name for name in ("digits", *outputs.OUTPUTS) if name in asked]:
        parts(of_digits)
    if "bounds" in asked:
        bounds()
