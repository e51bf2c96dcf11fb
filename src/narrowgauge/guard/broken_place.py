"""Which place broke? Decided from gauge readings, using the values of all processes.

The gauges (`quantization.gauges.figures`) read the step that went wrong and, for comparison, a step without
problems. What a cast loses in a place of a layer is a share from 0 to 1:

    lost = max(underflow, clipped, N / (S + N))       of an operand or of state; S / N is its SQNR as a ratio
    lost = max(lost, 1 - cosine)                      for the operand of a matmul that loses more

    excess = lost now - min(lost before, 1/2)         of any place but v
    excess = underflow now                            of v

If a second moment becomes zero while its gradient does not, the update divides by its eps (FP8-LM, arXiv
2310.18313, section 2.2), so no underflow of v is harmless. In other places some underflow is, as FP4 shows,
and only the increase counts. Without a comparison, half is allowed.

The place with the largest excess broke, in all layers where its excess is at least 1 %. If no place has any,
formats are not the cause.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from narrowgauge.recipes import GEMM_PLACES, STATE_PLACES
from narrowgauge.recipes.places import RESULTS, SEEN_BEFORE

HALF = 0.5
BROKEN = 0.01  # the least excess of a broken place
#: The operands of each result.
PRODUCTS = dict(zip(RESULTS, zip(GEMM_PLACES[::2], GEMM_PLACES[1::2], strict=True), strict=True))

Line = Mapping[str, Any]  # of `Gauges.lines`
Key = tuple[str, str]  # layer, place


@dataclass(frozen=True)
class BrokenPlace:
    """The place that broke."""

    place: str
    layers: tuple[str, ...]  # the layers in which it broke, in the order of the model
    cast: str  # the name of its cast there
    #: The share that the cast lost in the worst layer; None for a place with a NaN or an infinity
    lost: float | None

    def __str__(self) -> str:
        more = f" and {len(self.layers) - 1} more" if len(self.layers) > 1 else ""
        what = "is not finite" if self.lost is None else f"loses {self.lost:.3g} of its numbers"
        return f"{self.place} {what} in {self.cast} ({self.layers[0]}{more})"


def lost_in(line: Line) -> float:
    """The share that a cast loses, from the gauge of an operand or of state."""
    decibels = line["sqnr_db"]
    noise = 0.0 if decibels is None else 1 / (1 + 10 ** (decibels / 10))
    return float(max(line["underflow"], line["clipped"], noise))


def lost_by_place(lines: Iterable[Line], wide: Collection[str]) -> dict[Key, float]:
    """The share that each narrow place of each layer loses; casts named in `wide` are not narrow."""
    lost: dict[Key, float] = {}
    products: dict[Key, float] = {}
    for line in lines:
        key = line["layer"], line["place"]
        if key[1] in PRODUCTS:
            cosine = 1.0 if line["cosine"] is None else line["cosine"]
            products[key] = max(products.get(key, 0.0), 1 - cosine)
        elif key[1] in (*GEMM_PLACES, *STATE_PLACES) and line["cast"] not in wide:
            share = line["underflow"] if key[1] == "v" else lost_in(line)
            lost[key] = max(lost.get(key, 0.0), share)
    for (layer, product), share in products.items():
        operands = [(layer, place) for p in PRODUCTS[product] for place in (p, SEEN_BEFORE.get(p, p))]
        if read := [key for key in operands if key in lost]:
            worst = max(read, key=lambda key: lost[key])
            lost[worst] = max(lost[worst], share)
    return lost


def find_broken(now: Sequence[Line], before: Sequence[Line], wide: Collection[str]) -> BrokenPlace | None:
    """The place that broke, from the gauges of the bad step and of a good one; None if there is none.

    Args:
        now: The lines of the bad step, of all processes.
        before: The lines of a good step; empty if there is none.
        wide: The names of casts that are not narrow.
    """
    good = lost_by_place(before, wide)
    lost = lost_by_place(now, wide)
    for key in (key for key in good if key[1] == "v"):  # the bad step may have made no update
        lost[key] = max(good[key], lost.get(key, 0.0))
    allowed = {key: 0.0 if key[1] == "v" else min(good.get(key, HALF), HALF) for key in lost}
    excess = {key: share - allowed[key] for key, share in lost.items() if share - allowed[key] >= BROKEN}
    if not excess:
        return None
    worst = max(sorted(excess), key=lambda key: excess[key])
    layers = tuple(layer for layer, place in excess if place == worst[1])
    casts = {(line["layer"], line["place"]): line["cast"] for line in (*before, *now)}
    return BrokenPlace(worst[1], layers, casts[worst], lost[worst])
