"""The guard: decides whether a step is taken.

It judges after the backward pass and before the update, from the loss and the gradient norm of the global
batch, so all ranks decide alike. Its state is a few numbers in the checkpoint. The same history gives the
same decisions, also after a resume.

**Not finite.** If the loss or the norm is NaN or infinite, the step is skipped. Weights, moments and the
recipe's state stay as they were; the schedule and the data advance. More than `guard.max_skips` in a row end
the run.

**A spike.** Over the last `guard.spike_window` steps that were taken, with f = `guard.spike_factor`:

    loss > median + f * max(1.4826 * MAD, median / 100)        or        norm > f * median of the norms

MAD is the median distance from the median; 1.4826 times it is the standard deviation of normally distributed
values (Iglewicz and Hoaglin, "How to detect and handle outliers", 1993). Outliers move a mean and a
deviation, but not medians. Window and factor, 128 and 6, are from OLMo-core's `SkipStepOptimizer`, which
compares with mean and deviation; one NaN spoils its window until it has passed. Here only steps that were
taken enter the window, so it is always finite. The hundredth is for a loss that hardly moves, where every
small change would be a spike. Norms are compared by ratio because their scatter is multiplicative. There are
no spikes before the window is full, except that one in the warm-up is reported (`spike_ratio`).
`guard.spike` selects the reaction:

    off         nothing
    warn        an event, at the first of several in a row; the step is taken
    skip        the step is skipped like one that is not finite, and counts as such
    rollback    go back to the newest checkpoint and continue with other data: the batches since then,
                including that of the spike, are not used again (PaLM, arXiv 2204.02311, section 5.1, did
                this by hand). At most `guard.max_rollbacks` times, then the run ends
    raise       go back to a checkpoint and continue with the same data, but with the place that broke in
                a wider cast for good (`broken_place`); at most `MAX_RAISES` places. If no place broke, or
                as many are wide, as rollback. A step that is not finite is handled the same way, and
                skipped if no place broke; but while the loss is scaled (`fp16`), an overflow only lowers
                the scale

A step that is skipped for a spike does not enter the window either. So a loss that has moved to another level
for good ends the run by `guard.max_skips`, instead of skipping forever.
"""

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field, fields, replace
from statistics import median
from typing import Any, Literal

from narrowgauge.guard.raises import Raise, raises_of
from narrowgauge.system.errors import Failed

NORMAL = 1.4826  # standard deviation over median distance from the median
FLOOR = 0.01  # the least deviation, as a share of the median
MAX_RAISES = 4  # in a run: a recipe that breaks in more places is too narrow as a whole


Spike = Literal["off", "warn", "skip", "rollback", "raise"]


class Diverged(Failed):
    """The guard has ended the run: exit code 1."""


@dataclass(frozen=True)
class GuardRules:
    """The reactions to a step that is not finite, or a spike: plain values, for any training loop."""

    max_skips: int = 10  # steps skipped in a row before the run ends
    spike: Spike = "warn"  # the reaction to a spike
    # a spike is this many deviations of the loss above its median, or times the median norm
    spike_factor: float = 6.0
    spike_window: int = 128  # steps that a spike is compared with
    max_rollbacks: int = 3  # rollbacks of a run before it ends
    raise_to: str = ""  # the cast that an operand is widened to; "": the recipe's compute format
    check_every: int = 1000  # steps between comparisons of replicas; 0: only before a save
    replay_every: int = 0  # steps between two that are computed twice; 0: none


@dataclass(frozen=True)
class GuardVerdict:
    """The decision about a step, and its reason."""

    action: Literal["take", "warn", "skip", "rollback", "raise"] = "take"
    reason: str = ""
    is_finite: bool = True

    @property
    def accepts(self) -> bool:
        """Whether the update is made."""
        return self.action in ("take", "warn")


@dataclass
class Guard:
    """The rules of the guard, and its state."""

    rules: GuardRules
    losses: list[float] = field(default_factory=list)  # of the last `spike_window` steps that were taken
    norms: list[float] = field(default_factory=list)  # the gradient norms of the same steps
    skips: int = 0  # in the run
    skips_in_a_row: int = 0  # since the last step that was taken
    spikes_in_a_row: int = 0  # spikes that only caused a warning, since the last step without one
    rollbacks: int = 0  # in the run
    warmup_spikes: int = 0  # in the run; the first is reported
    samples: int = 0  # used or skipped by the run; the next step begins there
    raised: list[Raise] = field(default_factory=list)  # in the run, in order

    def judge(
        self, loss: float, norm: float, is_scaled: bool = False, is_warmup: bool = False
    ) -> GuardVerdict:
        """Decide about a step from loss and gradient norm of the global batch, and update the state.

        Args:
            loss: The loss.
            norm: The gradient norm before clipping.
            is_scaled: Whether the loss is scaled, so that a norm that is not finite lowers the scale.
            is_warmup: Whether the step is one of the warm-up.
        """
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raises = self.may_raise and not is_scaled
            verdict = GuardVerdict("raise" if raises else "skip", f"loss {loss}, gradient norm {norm}", False)
            return verdict if raises else self._skip(verdict)
        reason = "" if self.rules.spike == "off" else self._spike(loss, norm)
        if reason and self.rules.spike in ("raise", "rollback"):
            return GuardVerdict("raise" if self.may_raise else "rollback", reason)
        if reason and self.rules.spike == "skip":
            return self._skip(GuardVerdict("skip", reason))
        self.skips_in_a_row = 0
        self.spikes_in_a_row = self.spikes_in_a_row + 1 if reason else 0
        early = spike_ratio(self.norms, norm) if is_warmup and self.rules.spike != "off" else 0.0
        self.warmup_spikes += early > 0
        for window, value in ((self.losses, loss), (self.norms, norm)):
            window.append(value)
            del window[: -self.rules.spike_window]
        if self.spikes_in_a_row == 1:
            return GuardVerdict("warn", reason)
        if early and self.warmup_spikes == 1:
            return GuardVerdict(
                "warn",
                f"gradient norm {norm:.3g} in the warm-up is {early:.0f} times the median before it, so a "
                "comparison with this run begins in chaos; a longer warm-up, a lower optimizer.lr or "
                "model.initial_std = 0 avoids it",
            )
        return GuardVerdict()

    @property
    def may_raise(self) -> bool:
        """Whether a place may be widened."""
        return self.rules.spike == "raise" and len(self.raised) < MAX_RAISES

    def skip(self, verdict: GuardVerdict, why: str = "there is no checkpoint to return to") -> GuardVerdict:
        """Replace a verdict by a skip, with the reason."""
        return self._skip(replace(verdict, action="skip", reason=f"{verdict.reason}; {why}"))

    def rolled_back(self, before: "Guard") -> None:
        """Carry the counts of the guard `before` the rollback into this one, restored from a checkpoint.

        The position in the data is also kept, so the samples between the two are not used again.
        """
        self.went_back(before)
        self.rollbacks, self.samples = before.rollbacks + 1, before.samples

    def went_back(self, before: "Guard") -> None:
        """Keep the counts of the guard `before`, and the raised places; the same samples are used again."""
        self.skips, self.rollbacks, self.raised = before.skips, before.rollbacks, list(before.raised)
        self.warmup_spikes = before.warmup_spikes

    def require_patience(self, verdict: GuardVerdict, step: int, cause: str = "") -> None:
        """Check the limits of the rules after a verdict on a step.

        Raises:
            Diverged: Too many skips in a row, or too many rollbacks; the message includes `cause`.
        """
        more = f" ({cause})" if cause else ""
        if verdict.action == "rollback" and self.rollbacks >= self.rules.max_rollbacks:
            raise Diverged(
                f"step {step} is a spike ({verdict.reason}), and the run has gone back {self.rollbacks} "
                "times, which is guard.max_rollbacks; lower optimizer.lr or use a wider recipe in a new run, "
                "or continue with a larger one and --allow-change guard.max_rollbacks"
            )
        if verdict.action == "skip" and self.skips_in_a_row > self.rules.max_skips:
            had = "a spike" if verdict.is_finite else "a non-finite loss or gradient"
            raise Diverged(
                f"{self.skips_in_a_row} steps in a row had {had}, the last is {step}{more}; "
                "lower optimizer.lr or use a wider recipe"
            )

    def state(self) -> dict[str, Any]:
        """The state without the rules, for JSON."""
        rare = {"raised": [asdict(r) for r in self.raised], "warmup_spikes": self.warmup_spikes}
        names = [f.name for f in fields(self) if f.name != "rules" and f.name not in rare]
        kept = {name: copy(getattr(self, name)) for name in names}
        return kept | {name: value for name, value in rare.items() if value}

    @classmethod
    def from_state(cls, rules: GuardRules, checkpoint: Mapping[str, Any], samples: int) -> "Guard":
        """The guard from a checkpoint's state; one that has none is of a run that has used `samples`."""
        state = checkpoint.get("guard", {"samples": samples})
        return cls(rules, **state | {"raised": raises_of(checkpoint)})

    def _skip(self, verdict: GuardVerdict) -> GuardVerdict:
        self.skips, self.skips_in_a_row = self.skips + 1, self.skips_in_a_row + 1
        self.spikes_in_a_row = 0
        return verdict

    def _spike(self, loss: float, norm: float) -> str:
        """The reason why a step is a spike; "" if it is not one."""
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


def spike_ratio(before: Sequence[float], norm: float) -> float:
    """A gradient norm of the warm-up as a multiple of the median of the twenty `before` it; 0: no spike.

    A spike is above three times that median, after the fifth step (measured at seven widths:
    experiments/LOG.md, 2026-11-23). From there on two runs of one seed are different runs: pairs of ladder 1,
    whose warm-ups spike, deviate by 0.5 to 0.9 %, and in the pilot of ladder 2 pairs from the same weights by
    0.58 % with spikes and by 0.13 % without (docs/evidence.md). No reaction helps, so the step is taken.

    >>> spike_ratio([1.0, 9.0, 1.0, 1.0, 1.0, 2.0], 4.0), spike_ratio([1.0, 1.0], 9.0)
    (4.0, 0.0)
    """
    middle = median(before[-20:]) if len(before) >= 5 else 0.0
    return norm / middle if norm > 3 * middle > 0 else 0.0
