"""`bench --read`: prints the findings in a file of `bench --verify`, which may be from another machine.

Nothing in the file is executed. A file left by a killed run is read as far as it goes.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from narrowgauge.errors import UserError, words_of

_GIB = 2.0**30
_HOST_IS_SLOWER = 0.9  # the device computes for at least this share of a step if the host keeps ahead


def read(file: Path) -> dict[str, Any]:
    """The JSON values of a file.

    Raises:
        UserError: It cannot be read, or `bench --verify` did not write it.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{file} cannot be read: {words_of(error)}; --read takes a file of --verify"
        ) from None
    if not isinstance(found, dict) or not {"complete", "machine", "verify"} <= found.keys():
        raise UserError(f"{file} is not a file of bench --verify; that command writes one")
    return found


def is_right(found: Mapping[str, Any]) -> bool:
    """Whether the run ended, nothing differed, and no part failed."""
    checks = (found["verify"] or {}).get("checks", [])
    return found["complete"] and not found["errors"] and all(c["outcome"] != "differs" for c in checks)


def in_words(found: Mapping[str, Any]) -> Iterator[str]:
    """The lines to print: machine, speed, memory, host or device bound, differences, failures."""
    machine = found["machine"]
    yield ", ".join(f"{key} {machine[key]}" for key in ("device", "torch", "narrowgauge") if key in machine)
    if not found["complete"]:
        yield "the run was stopped early: these are its findings until then"
    if measured := found["measured"]:
        yield from _speed(measured, found["counted"])
    checks = (found["verify"] or {}).get("checks", [])
    wrong = [c for c in checks if c["outcome"] == "differs"]
    asked = [c for c in checks if c["outcome"] not in ("not here", "skipped")]
    skipped = [f"{c['group']}, {c['name']}" for c in checks if c["outcome"] == "skipped"]
    yield f"{len(asked) - len(wrong)} of {len(asked)} checks agree"
    if skipped:
        yield f"skipped for lack of time: {'; '.join(skipped)}"
    for c in wrong:
        yield f"differs: {c['group']}, {c['name']}: {c['found']}; {c['do']}"
    for error in found["errors"]:
        yield f"failed: {error['part']}: {error['error']}"


def _speed(measured: Mapping[str, Any], counted: Mapping[str, Any] | None) -> Iterator[str]:
    taken = sorted(measured["seconds"]["narrowgauge"])
    step_s = taken[len(taken) // 2]
    what = f"{measured['model']}, recipe {measured['recipe']} ({measured['backend']})"
    words = f"{what}: {measured['tokens_per_step'] / step_s:,.0f} tokens/s"
    if counted:
        words += f", {step_s / counted['step_seconds']['calibrated']:.2f} times the counted time"
    yield words
    words = f"memory: {measured['memory']['allocated'] / _GIB:.1f} GiB measured"
    yield words + (f", {counted['peak_bytes'] / _GIB:.1f} GiB counted" if counted else "")
    busy = measured["device_is_busy"]
    who = "the host keeps ahead" if busy >= _HOST_IS_SLOWER else "the device waits for the host"
    yield f"{who}: the device computes in {busy:.0%} of a step"
    for name, words in measured["in_words"].items():
        yield f"compared with {name}: {words}"
