"""The guard: is a step good enough to be taken?

Asked after the backward pass and before the update, it sees two numbers of the step, its loss and its
gradient norm, both of the whole batch, so that every rank decides alike. Its own state is a few numbers that
lie in the checkpoint, and the same history gives the same decisions, after a resume too.

**Not finite.** A NaN or an infinity in either number: the step is skipped. Weights, moments and what recipes
remember stay as they were, the schedule and the data go on. More than `guard.max_skips` in a row end the run.

**A spike.** Over the last `guard.spike_window` steps that were taken, with f = `guard.spike_factor`:

    loss > median + f * max(1.4826 * MAD, median / 100)        or        norm > f * median of the norms

MAD is the median distance from the median; 1.4826 of it is the standard deviation of normal numbers
(Iglewicz and Hoaglin, "How to detect and handle outliers", 1993). Medians, since a mean and a deviation are
moved by the very outliers they should find. Window and factor, 128 and 6, are those of OLMo-core's
`SkipStepOptimizer`, which compares with mean and deviation, and whose window one NaN spoils until it has
passed. Here only steps that were taken enter, so nothing non-finite ever does. The hundredth keeps a loss
that hardly moves from calling every twitch a spike; norms are compared by ratio because they scatter that
way. There are no spikes before the window is full. `guard.spike` says what follows:

    off         nothing
    warn        an event, at the first of several in a row; the step is taken
    skip        the step is skipped as one that is not finite, and counts as such
    rollback    back to the newest checkpoint, and on with other data: the batches of the steps since then,
                that of the spike included, are never met again (PaLM, arXiv 2204.02311, section 5.1, did
                this by hand). At most `guard.max_rollbacks` times, then the run ends

A step that is skipped for a spike does not enter the window either: a loss that has moved to another level
for good ends the run by `guard.max_skips`, with a sentence, and is not skipped in silence for ever.
"""

import math
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, fields
from statistics import median
from typing import Any, Literal

from narrowgauge.training.config.schema import GuardSection

NORMAL = 1.4826  # standard deviations in a median distance from the median
FLOOR = 0.01  # of the median: the least deviation that is believed


class Diverged(Exception):
    """The guard has ended the run: exit code 1."""


@dataclass(frozen=True)
class GuardVerdict:
    """What is to be done with a step, and why."""

    action: Literal["take", "warn", "skip", "rollback"] = "take"
    reason: str = ""
    is_finite: bool = True

    @property
    def takes(self) -> bool:
        """Whether the update is made."""
        return self.action in ("take", "warn")


@dataclass
class Guard:
    """The rules, and all that is remembered from step to step.

    Attributes:
        losses, norms: of the last steps that were taken, at most `spike_window`.
        skips: of the run; skips_in_a_row: up to now; spikes_in_a_row: of those that were only told.
        rollbacks: of the run.
        samples: of the run's data that lie behind it, taken or skipped: where the next step's begin.
    """

    rules: GuardSection
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    skips: int = 0
    skips_in_a_row: int = 0
    spikes_in_a_row: int = 0
    rollbacks: int = 0
    samples: int = 0

    def judge(self, loss: float, norm: float) -> GuardVerdict:
        """Decide about a step, and remember it. The arguments are those of the whole batch."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return self._skip(GuardVerdict("skip", f"loss {loss}, gradient norm {norm}", is_finite=False))
        reason = "" if self.rules.spike == "off" else self._spike(loss, norm)
        if reason and self.rules.spike == "rollback":
            return GuardVerdict("rollback", reason)
        if reason and self.rules.spike == "skip":
            return self._skip(GuardVerdict("skip", reason))
        self.skips_in_a_row = 0
        self.spikes_in_a_row = self.spikes_in_a_row + 1 if reason else 0
        for window, value in ((self.losses, loss), (self.norms, norm)):
            window.append(value)
            del window[: -self.rules.spike_window]
        return GuardVerdict("warn", reason) if self.spikes_in_a_row == 1 else GuardVerdict()

    def cannot_roll_back(self, verdict: GuardVerdict) -> GuardVerdict:
        """The verdict instead of a rollback where there is no checkpoint to go back to: a skip."""
        return self._skip(GuardVerdict("skip", f"{verdict.reason}; there is no checkpoint to go back to"))

    def rolled_back(self, before: "Guard") -> None:
        """This is the guard of a checkpoint: carry on what the one `before` the rollback has counted.

        Its place in the data, too: what lies between the two is not met again.
        """
        self.skips, self.rollbacks, self.samples = before.skips, before.rollbacks + 1, before.samples

    def require_patience(self, verdict: GuardVerdict, step: int, found: str = "") -> None:
        """Raise `Diverged` where a verdict is one too many; `found` tells what else is known of the step."""
        more = f" ({found})" if found else ""
        if verdict.action == "rollback" and self.rollbacks >= self.rules.max_rollbacks:
            raise Diverged(
                f"step {step} is a spike ({verdict.reason}), and the run has gone back {self.rollbacks} "
                "times, which is guard.max_rollbacks; lower optimizer.lr or use a wider recipe in a new run, "
                "or go on with a larger one and --allow-change guard.max_rollbacks"
            )
        if verdict.action == "skip" and self.skips_in_a_row > self.rules.max_skips:
            had = "a spike" if verdict.is_finite else "a non-finite loss or gradient"
            raise Diverged(
                f"{self.skips_in_a_row} steps in a row had {had}, the last is {step}{more}; "
                "lower optimizer.lr or use a wider recipe"
            )

    def state(self) -> dict[str, Any]:
        """Everything but the rules, for JSON."""
        return {f.name: copy(getattr(self, f.name)) for f in fields(self) if f.name != "rules"}

    @classmethod
    def from_state(cls, rules: GuardSection, checkpoint: Mapping[str, Any], samples: int) -> "Guard":
        """The guard in a checkpoint's state, under "guard"; older ones have a count alone.

        They have taken `samples`, and skipped none.
        """
        older = {"skips_in_a_row": checkpoint.get("skips_in_a_row", 0), "samples": samples}
        state = checkpoint.get("guard", older)
        names = {f.name for f in fields(cls)} - {"rules"}
        return cls(rules, **{name: value for name, value in state.items() if name in names})

    def _skip(self, verdict: GuardVerdict) -> GuardVerdict:
        self.skips, self.skips_in_a_row = self.skips + 1, self.skips_in_a_row + 1
        self.spikes_in_a_row = 0
        return verdict

    def _spike(self, loss: float, norm: float) -> str:
        """Why a step is a spike, or ""."""
        size, factor = self.rules.spike_window, self.rules.spike_factor
        if len(self.losses) < size:
            return ""
        middle, typical = median(self.losses), median(self.norms)
        deviation = max(NORMAL * median(abs(x - middle) for x in self.losses), FLOOR * abs(middle))
        if loss > middle + factor * deviation:
            return (
                f"loss {loss:.6g} is {(loss - middle) / deviation:.1f} deviations above {middle:.6g}, "
                f"the median of {size} steps"
            )
        if norm > factor * typical:
            return f"gradient norm {norm:.6g} is far above {typical:.6g}, the median of {size} steps"
        return ""
