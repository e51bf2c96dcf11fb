"""Which code runs a recipe on a device: the hardware's own formats, or emulation, and why."""

from dataclasses import dataclass

from narrowgauge.errors import UserError, unknown
from narrowgauge.recipes.recipe import Recipe

BACKENDS = ("auto", "native", "emulated")


@dataclass(frozen=True, slots=True)
class Backend:
    """The choice that was made: `name` is "native" or "emulated", `reason` a clause that says why."""

    name: str
    reason: str


def choose_backend(recipe: Recipe, device_type: str, wish: str = "auto") -> Backend:
    """Decide how a recipe runs on a device type ("cpu", "cuda").

    Raises:
        UserError: an unknown wish, or a native backend asked for where there is none.
    """
    if wish not in BACKENDS:
        raise unknown("backend", wish, BACKENDS)
    if not recipe.is_narrow:
        return Backend("native", f"torch multiplies {recipe.compute} itself")
    reason = (
        "a CPU has no narrow matrix units" if device_type == "cpu" else "this version has no native kernels"
    )
    if wish == "native":
        raise UserError(
            f"recipe {recipe.name!r} cannot run natively here: {reason}; "
            f"use --backend emulated (the same numbers, computed in {recipe.compute})"
        )
    return Backend("emulated", f"{reason}; the same numbers in {recipe.compute} GEMMs")
