"""docs/conformance.md from matrix.csv, causes.csv and the reproductions: `python conformance/page.py`."""

import csv
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path

import found

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "conformance.md"
MARKS = {"fault": "F", "rule": "r", "range": "t", "open": "o", "refusal": "x"}
KINDS = {
    "fault": "against a specification, or against what the library itself promises",
    "rule": "another rule, or another order of float32 operations, that loses no more",
    "range": "magnitudes beyond what float32 can scale; no specification covers them",
    "open": "the specification leaves it open: NaN and infinity in a block",
    "refusal": "the library refuses it with an exception",
}
TABLES = {  # heading -> the formats of its rows
    "Single values": "* element*",
    "FP8 under float32 scales": "fp8 *",
    "MX": "mx*",
    "NVFP4": "nvfp4*",
}
HEAD = """# Other libraries, case by case

`python conformance/matrix.py` gives the same small tensors to each library, each made for one property of a
format. An exact oracle in rational arithmetic judges the codes and scales that come back. This page is made
by `python conformance/page.py`; a library that is not installed keeps its stored rows.

## Faults

None of these is filed yet. Each reproduction in `conformance/found/` is ten lines, with the output, the
output that is due, the sentence that requires it, and the line of code. `python conformance/found.py` runs
them.

<!-- faults -->

"""
RULES = """
<!-- end faults -->

They contradict what the library itself promises, or one of these:

- **MX 6.3** (OCP Microscaling Formats 1.0): the scale X is "the largest power-of-two less than or equal to
  max(|Vi|), divided by the largest power-of-two representable in the element data type". Values beyond the
  largest normal number are clamped to it, and ties go to even.
- **MX 5.1, 5.4.1**: E8M0 has the exponents -127 to 127, no infinity and no zero. Its one NaN, the code 255,
  makes all values of its block NaN.
- **OFP8** (OCP 8-bit Floating Point 1.0): conversion saturates to the largest number, or overflows to NaN
  or infinity.
- **754** (IEEE 754-2019, 4.3.1): the nearest number; of two equally near ones, the one with an even last
  digit.

Only the quotation is verbatim. A difference in a block with a NaN or an infinity, or in an NVFP4 tensor
whose amax is below 7.9e-36, is not a fault, because no specification covers it.

## All cases

A row starts with the mark of most of its cases and lists the cases with another mark. narrowgauge has no
rows, because every mark is `=`.

<!-- tables -->

| mark | meaning |
|---|---|
| `=` | codes and scales equal, bit for bit; for a stored tensor: its values |
| `v` | values equal up to the last bits of float32; a code or scale differs, or the library returns none |
"""
CAUSES = """Why a library differs without a fault, first match first. `conformance/causes.csv` has all."""
PEERS = """## Their tests, with narrowgauge's casts

`python conformance/peers.py` runs the tests of ml_dtypes (a case is a number) and TransformerEngine (`te`; a
case is a test) with narrowgauge's casts in the place of theirs, and compares nanochat's quantization.

| library | version | cases | agree | differ |
|---|---|---|---|---|"""
Row = dict[str, str]


def read(name: str) -> list[Row]:
    """The rows of a table of this folder."""
    with (HERE / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def cause_of(row: Row, causes: list[Row]) -> Row | None:
    """The first cause that fits a row."""
    for cause in causes:
        fits = cause["library"] == row["library"] and fnmatchcase(row["format"], cause["formats"])
        if fits and any(fnmatchcase(row["case"], c) for c in cause["cases"].split(";")):
            return cause
    return None


def page() -> str:
    """The text of the page."""
    rows, causes = read("matrix.csv"), read("causes.csv")
    marks = "".join(f"| `{MARKS[kind]}` | {text} |\n" for kind, text in KINDS.items())
    parts = [HEAD + found.table() + "\n" + RULES + marks]
    versions = dict(sorted({r["library"]: (r["version"], r["date"]) for r in rows}.items()))
    newest = max(date for _, date in versions.values())
    head = f"## Libraries\n\nTested on {newest}, if no other day is given.\n\n| library | version | "
    parts.append(head + " | ".join(f"`{m}`" for m in "=vFrtox") + " |\n|" + "---|" * 9)
    for name, (version, date) in versions.items():
        counts = [sum(_mark(r, causes) == m for r in rows if r["library"] == name) for m in "=vFrtox"]
        day = "" if date == newest else f" ({date})"
        parts[-1] += f"\n| {name} | {version}{day} | " + " | ".join(map(str, counts)) + " |"
    peers = [" | ".join(row.values()) for row in read("peers.csv")]
    parts.append("\n".join([PEERS, *(f"| {line} |".replace("_", "\\_") for line in peers)]))
    rows = [r for r in rows if r["library"] != "narrowgauge"]
    for heading, pattern in TABLES.items():
        parts.append(_table(heading, [r for r in rows if fnmatchcase(r["format"], pattern)], causes))
    lines = [f"## Causes\n\n{CAUSES}\n"]
    for library, cause in groupby((c for c in causes if c["kind"] != "fault"), lambda c: c["library"]):
        lines += [f"**{library}**".replace("_", "\\_"), "", *map(_line, cause), ""]
    return "\n\n".join([*(p.rstrip("\n") for p in parts), "\n".join(lines), "<!-- end tables -->"]) + "\n"


def _line(cause: Row) -> str:
    """An item of a list: the mark of a cause, its formats and cases, and its text."""
    where = f"{cause['formats']}: {cause['cases'].replace(';', ', ')}"
    return f"- `{MARKS[cause['kind']]}` {where}. {cause['cause']}".replace("*", "\\*").replace("_", "\\_")


def _mark(row: Row, causes: list[Row]) -> str:
    if row["verdict"] in ("equal", "values"):
        return {"equal": "=", "values": "v"}[row["verdict"]]
    cause = cause_of(row, causes)
    return MARKS[cause["kind"]] if cause else "?"


def _table(heading: str, rows: list[Row], causes: list[Row]) -> str:
    """One row for the formats of a library that give the same marks in the same cases."""
    marks_of: dict[tuple[str, str], dict[str, list[str]]] = {}
    for r in rows:
        marks = marks_of.setdefault((r["library"], r["format"]), {mark: [] for mark in "=vFrtox"})
        marks[_mark(r, causes)].append(r["case"])
    alike: dict[tuple[str, str], list[str]] = {}
    for (library, name), marks in marks_of.items():
        alike.setdefault((library, _summary(marks)), []).append(name)
    out = [f"## {heading}\n", "| library | formats | marks |", "|---|---|---|"]
    for (library, marks), names in alike.items():
        out.append(f"| {library} | {', '.join(names)} | {marks} |")
    return "\n".join(out).replace("_", "\\_")


def _summary(marks: dict[str, list[str]]) -> str:
    """The mark that most cases have, and the cases of each other mark."""
    most = max(marks, key=lambda mark: len(marks[mark]))
    others = [f"; `{mark}` {', '.join(cases)}" for mark, cases in marks.items() if cases and mark != most]
    return f"`{most}`" + "".join(others).replace("decode, scale", "decode of scale")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
