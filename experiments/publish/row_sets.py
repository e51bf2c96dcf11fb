"""The rows of the stages of ladder 2, which were validated on two numbers of held-out tokens.

A gap is taken between rows of one number. The first runs had 65,536 tokens, whose sampling error is most of
what 8-bit arms deviate; an arm is judged by its runs with 1,048,576 once they are as many.
"""

from collections import Counter
from collections.abc import Sequence

from narrowgauge.report.verdict.rungs import Row

REFERENCE = "bf16"
#: The directories of rows by their held-out tokens, the finer first.
HELD_OUT = {"stages": 1_048_576, "stages-65k": 65_536}


def row_sets(fine: Sequence[Row], coarse: Sequence[Row]) -> list[tuple[int, list[Row]]]:
    """The held-out tokens and the rows of the arms that they judge, with the reference; none without arms.

    Args:
        fine: The rows of a part with most held-out tokens.
        coarse: Those with few.
    """
    have, had = (Counter(row.arm for row in rows if row.arm != REFERENCE) for rows in (fine, coarse))
    is_fine = {arm: have[arm] >= had[arm] for arm in {*have, *had}} | {REFERENCE: True}
    left = [row for row in coarse if row.arm == REFERENCE or not is_fine[row.arm]]
    sets = zip(HELD_OUT.values(), ([row for row in fine if is_fine[row.arm]], left), strict=True)
    return [(tokens, rows) for tokens, rows in sets if any(row.arm != REFERENCE for row in rows)]
