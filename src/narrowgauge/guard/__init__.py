"""Is a step taken, and which place broke? The rules, the verdict on a step, and the widened places."""

from narrowgauge.guard.guard import Diverged, Guard, GuardRules, GuardVerdict

__all__ = ["Diverged", "Guard", "GuardRules", "GuardVerdict"]
