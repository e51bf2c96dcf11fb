"""Formats sizes and counts as text, and parses sizes: one function for each."""

import math
import re

from narrowgauge.system.errors import UserError

_BINARY = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def human_bytes(size: float) -> str:
    """Bytes in binary units with one decimal.

    >>> [human_bytes(n) for n in (3 * 2**30, 1_500_000, 12)]
    ['3.0 GiB', '1.4 MiB', '12 bytes']
    """
    for unit, name in _BINARY:
        if size >= unit:
            return f"{size / unit:,.1f} {name}"
    return f"{size:.0f} bytes"


def human_count(count: float) -> str:
    """A count with at most four digits: 950, 65.5 k, 12.3 M, 1.20 B.

    >>> [human_count(n) for n in (950, 999.6, 65_536, 999_999, 3e15)]
    ['950', '1.00 k', '65.5 k', '1.00 M', '3000 T']
    """
    for suffix, unit in (("", 1), (" k", 1e3), (" M", 1e6), (" B", 1e9), (" T", 1e12)):
        if abs(count) < 999.5 * unit or suffix == " T":  # 999.5 would be printed as 1000
            break
    value = count / unit
    decimals = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0  # three digits
    return f"{value:.{decimals}f}{suffix}" if suffix else f"{count:.0f}"


def signed_percent(percent: float, digits: int = 2) -> str:
    """A difference in percent, signed, with two decimals; a value that rounds to zero has no sign.

    >>> [signed_percent(x) for x in (1.234, -0.5, -0.004, 0.0, float("nan"))]
    ['+1.23 %', '-0.50 %', '0.00 %', '0.00 %', 'not finite']
    """
    return f"{signed(percent, digits)} %" if math.isfinite(percent) else "not finite"


def percent_range(low: float, high: float) -> str:
    """An interval in percent.

    >>> percent_range(-0.5, 1.25)
    '-0.50 .. +1.25 %'
    """
    return f"{signed(low)} .. {signed_percent(high)}"


def signed(number: float, digits: int = 2) -> str:
    """A finite number, signed, with two decimals; a value that rounds to zero has no sign."""
    text = f"{number:+.{digits}f}"
    return text[1:] if float(text) == 0 else text


def human_duration(seconds: float) -> str:
    """A duration in its two largest units: 4.2 s, 12 min 3 s, 5 h 20 min, 3 d 4 h.

    >>> [human_duration(s) for s in (4.21, 59.96, 723, 19_230, 273_900)]
    ['4.2 s', '1 min 0 s', '12 min 3 s', '5 h 20 min', '3 d 4 h']
    """
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    units = ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))
    whole = {unit: round(seconds / part) * part for unit, _, part, _ in units}
    unit, name, part, part_name = next((u for u in units if whole[u[0]] >= u[0]), units[-1])
    return f"{whole[unit] // unit} {name} {whole[unit] % unit // part} {part_name}"


def parse_bytes(size: str) -> int:
    """The bytes of a size such as 24GB (10^9), 22GiB (2^30), 500MB or 4096B; 0 for ""."""
    if not size:
        return 0
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B)?", size.strip(), re.IGNORECASE)
    if not match:
        raise UserError(f"memory size {size!r}: it must be a number and a unit, such as 24GB or 22GiB")
    number, unit, binary = match.groups()
    if number == size.strip():
        raise UserError(
            f"memory size {size!r} has no unit; write {number}GB (10^9 bytes) or {number}GiB (2^30)"
        )
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index((unit or " ").upper()))


def parse_count(text: str) -> float:
    """A number of at least 1, such as 300B, 1T or 1.5e12; 0 if the text is none.

    >>> parse_count("38B"), parse_count("1.9e9"), parse_count("many")
    (38000000000.0, 1900000000.0, 0.0)
    """
    units = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
    digits, unit = (text[:-1], units[text[-1].upper()]) if text[-1:].upper() in units else (text, 1.0)
    try:
        number = float(digits) * unit
    except ValueError:
        return 0.0
    return number if 1 <= number < 1e18 else 0.0
