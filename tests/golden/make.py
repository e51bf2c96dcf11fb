"""Makes the golden files again: `python tests/golden/make.py [PART ...]`; no PART = all of them.

`test_golden.py` holds the project to these files, digit for digit. A change of the code's shape changes none
of them. Make them again only

- after a change that is meant to change digits (a rounding, an order of sums, a default), a file or a text:
  say in the commit which recipes changed and why, and read the diff line by line, as code is read: a line
  that changed without a reason is a mistake that was just found;
- after a new recipe, which adds lines and changes none;
- with another version of torch, once the project moves to it: from a commit whose test passed with the old
  one, and in a commit that does nothing else.

Never because a test fails and one does not know why. The digits of `exact` hold on every CPU, and so do
those of the runs on four models. Others hold for one arithmetic, of an x86-64 CPU with AVX2, which a
fingerprint next to them identifies: on a machine that computes otherwise they are skipped.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from golden import cells, exact, outputs, pages, resolved
from golden.runs import kept_file, read_kept, worker
from narrowgauge.quantization import cast_names
from narrowgauge.recipes import recipe_names


def parts(names: list[str]) -> None:
    """Keeps digits with the fingerprint of their arithmetic, and what else the command line writes."""
    with tempfile.TemporaryDirectory() as directory, worker(Path(directory)) as process:
        (arithmetic,) = process({"fingerprint": True})
        for name in names:
            if name == "digits":
                runs = {run: cells.take(process, run) for run in cells.RUNS}
                write(name, {"arithmetic": arithmetic, "runs": runs})
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
PARTS = ["exact", "digits", *outputs.OUTPUTS, "resolved", "page"]

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; none: all")
    asked = parser.parse_args().parts or PARTS
    if unknown := set(asked) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    if "exact" in asked:
        of_layers = {name: exact.of_layer(name) for name in recipe_names()}
        write("exact", {"casts": {name: exact.of_cast(name) for name in cast_names()}, "layers": of_layers})
    if "resolved" in asked:  # follows from no digit
        resolved.write()
    if "page" in asked:
        for name, (page, _) in pages.TABLES.items():
            page.write_text(pages.text(name), encoding="utf-8")
            print(page)
    if of_digits := [name for name in ("digits", *outputs.OUTPUTS) if name in asked]:
        parts(of_digits)
