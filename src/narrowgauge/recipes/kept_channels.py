"""Channels kept in another cast (`keep_channels`): which places can keep them, and what they need.

The channels are columns of a layer's input, and chosen from it. Its weight has the same columns, and so has
the weight's gradient: there the columns of kept channels are the matmul of two operands in `keep_cast`.
"""

from collections.abc import Mapping, Sequence

from narrowgauge.errors import UserError
from narrowgauge.quantization import Cast

CHOOSES = "fprop.x"
MEETS = "wgrad.dy"  # has no such channels itself, but is multiplied with the channels of wgrad.x
KEEPING = (CHOOSES, "fprop.w", "wgrad.x")


def require_channels(casts: Mapping[str, Cast], inputs: Sequence[Cast], where: str) -> None:
    """Refuse kept channels that are never chosen, are empty, or meet no operand in their cast.

    Args:
        casts: The casts of the six places at some time.
        inputs: Every cast that fprop.x has at any time.
        where: The recipe, for the error.

    Raises:
        UserError: A place cannot keep them, or the places do not agree.
    """
    shares = {(c.keep_channels, c.keep_steps, c.keep_every) for c in inputs if c.keep_channels}
    if len(shares) > 1:
        raise UserError(
            f"{where}: fprop.x keeps other channels from some time on, but a layer chooses them in one way; "
            "give all its casts the same keep_channels, keep_steps and keep_every"
        )
    for place, cast in casts.items():
        if cast.keep_cast:
            _require_place(place, cast, where)
        if not cast.keep_channels or place == CHOOSES:
            continue
        if cast.keep_channels not in {share for share, *_ in shares}:
            raise UserError(
                f"{where}: {place} has keep_channels = {cast.keep_channels:g}, but a layer's channels are "
                f"the channels of its input; give {CHOOSES} the same keep_channels"
            )
        if cast.keep_steps != 1 or cast.keep_every:
            raise UserError(
                f"{where}: keep_steps or keep_every in {place}, but a layer's channels are chosen from its "
                f"input; say it in {CHOOSES}"
            )
    x, dy = casts["wgrad.x"], casts[MEETS]
    if (dy.keep_cast and not x.keep_channels) or (x.keep_channels and x.hadamard and not dy.keep_cast):
        raise UserError(
            f"{where}: only one operand of wgrad has a cast for kept channels, which are not transformed; "
            f"write keep_channels and keep_cast in wgrad.x, and keep_cast in {MEETS}"
        )


def _require_place(place: str, cast: Cast, where: str) -> None:
    """Refuse a cast for kept channels in a place that keeps none."""
    if place not in (*KEEPING, MEETS):
        raise UserError(
            f"{where}: keep_cast = {cast.keep_cast!r} in {place}, but kept channels are columns of a "
            f"layer's input, which {', '.join(KEEPING)} have and {MEETS} meets; remove the key"
        )
    if place == MEETS and cast.keep_channels:
        raise UserError(
            f"{where}: keep_channels = {cast.keep_channels:g} in {place}, but it only meets the channels of "
            "wgrad.x; write keep_cast alone"
        )
    if place != MEETS and not cast.keep_channels:
        raise UserError(
            f"{where}: keep_cast = {cast.keep_cast!r} in {place}, but it keeps no channels; add "
            "keep_channels, such as 0.1"
        )
    if place.startswith("fprop") and cast.hadamard:
        raise UserError(
            f"{where}: keep_channels and hadamard = {cast.hadamard} in {place}, but a transform along "
            "the channels mixes them; leave out one of the two"
        )
