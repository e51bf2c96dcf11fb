"""Make the page of `make gpu` from its JUnit file: the machine, what failed with its figures, what passed.

    python tests/gpu/page.py gpu.xml gpu.md

The exit code is 1 unless every case passed or takes another machine.
"""

import sys
import xml.etree.ElementTree as ET
from pathlib import Path

OUTCOMES = {"failure": "failed", "error": "failed", "skipped": "not here"}


def page_of(cases):
    """The lines of the page, and the number of cases that failed."""
    found, machine = {}, {}
    for case in cases:
        told = {p.get("name"): p.get("value") for p in case.iter("property")}
        advice = told.pop("advice", "")
        name = f"{case.get('classname').rpartition('.')[2]}: {case.get('name')}"
        if "device" in told:
            machine = told
        said = next((child for child in case if child.tag in OUTCOMES), None)
        outcome = "passed" if said is None else OUTCOMES[said.tag]
        found.setdefault(outcome, []).append((name, case, said, advice, told.get("found", "")))
    failed, passed, not_here = (found.get(o, []) for o in ("failed", "passed", "not here"))
    total = f"{len(passed)} of {len(passed) + len(failed)} cases passed"
    yield f"# {machine.get('device', 'unknown device')}: {total}, {len(not_here)} take another machine"
    for name, _, said, advice, _ in failed:
        words = (said.text or said.get("message") or "").strip()
        yield from ("", f"## {name} failed", "", f"What to do: {advice}", "", *indented(words))
    yield from ("", "## The machine", "")
    for key, value in machine.items():
        yield from (f"- {key}: {value.splitlines()[0]}", *indented("\n".join(value.splitlines()[1:])))
    yield from ("", "## All cases", "", "| case | outcome | seconds | found |", "|---|---|---|---|")
    for outcome, rows in found.items():
        for name, case, said, _, words in rows:
            why = said.get("message", "").removeprefix("Skipped: ") if outcome == "not here" else words
            yield f"| {name} | {outcome} | {float(case.get('time')):.1f} | {why} |"


def indented(text):
    """Each line as Markdown prints it as it is."""
    return [f"    {line}".rstrip() for line in text.splitlines()]


def main(source, target):
    """The exit code."""
    cases = list(ET.parse(source).iter("testcase"))
    Path(target).write_text("\n".join(page_of(cases)) + "\n", encoding="utf-8")
    is_whole = cases and not any(child.tag in ("failure", "error") for case in cases for child in case)
    print(f"{source} and {target}: send both if anything failed")
    return 0 if is_whole else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
