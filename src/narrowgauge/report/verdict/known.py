"""The deviation of gaps that earlier runs of a length had.

With few tokens for each parameter the curves are still steep, and the luck of the warm-up is most of the gap.
"""

import math

from narrowgauge.errors import UserError
from narrowgauge.models import count_block_weights, model_config
from narrowgauge.report.read.run import Run

#: Paired standard deviation of the gap in percent, by the tokens for each parameter up to which it holds.
KNOWN = (
    (0.5, 0.5, "docs/lab-log-archive.md: 5 M parameters, 0.2 tokens each"),
    (3.0, 0.9, "docs/evidence.md, seven arms: 0.89 and 0.97 % at 0.85 M parameters, 1.0 and 1.9 tokens each"),
    (math.inf, 0.5, "docs/evidence.md, seven arms: 0.49 % there, 3.8 tokens each"),
)


def known_deviation(tokens_per_parameter: float) -> float:
    """The paired standard deviation in percent that earlier runs of such a length had.

    >>> known_deviation(0.2), known_deviation(12)
    (0.5, 0.5)
    """
    return next(deviation for limit, deviation, _ in KNOWN if tokens_per_parameter < limit)


def known_of(run: Run) -> float:
    """The deviation that runs as long as this one are known to have; 0 if its model is unknown."""
    section = run.config.get("model", {})
    try:
        model = model_config(**{key: value for key, value in section.items() if key != "weights"})
    except (UserError, TypeError, AttributeError):
        return 0.0
    return known_deviation(run.tokens / count_block_weights(model))
