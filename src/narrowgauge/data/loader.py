"""How do tokens become batches?

A window is `sequence_length` consecutive tokens; window w starts at token w x sequence_length, so windows lie
side by side and every token is met once an epoch. The target of a token is the one after it: y is x moved on
by one, and the last target of a window is the first token of the next. Documents are not kept apart; the
end-of-document id between them is what a model learns to heed.

Shapes: B sequences of a batch, T = sequence_length tokens of a sequence.
"""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from narrowgauge.data.order import samples
from narrowgauge.data.token_file import Tokens
from narrowgauge.errors import UserError


def count_windows(tokens: Tokens, sequence_length: int, part: str = "training") -> int:
    """The windows in `tokens`: the samples of an epoch.

    Errors: `UserError` where there is not one window and its last target; `part` names the tokens in it.
    """
    assert sequence_length >= 1
    windows = (len(tokens) - 1) // sequence_length
    if windows < 1:
        raise UserError(
            f"the {part} part of the data holds {len(tokens)} tokens, and a sequence of {sequence_length} "
            f"needs {sequence_length + 1}; bring more text or set data.sequence_length to "
            f"{max(len(tokens) - 1, 1)} or less"
        )
    return windows


def training_batch(
    tokens: Tokens, seed: int, first_sample: int, count: int, sequence_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples first_sample .. first_sample + count - 1 of the run: (x_BT, y_BT), int64 on the CPU.

    A rank that takes its own slice of a step's samples asks for that slice. Errors: as `count_windows`.
    """
    window_B = samples(seed, first_sample, count, count_windows(tokens, sequence_length))
    return _batch(tokens, window_B, sequence_length)


def validation_batches(
    tokens: Tokens, batch_size: int, sequence_length: int, limit: int | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The same batches every time: (x_BT, y_BT), int64 on the CPU, at most `limit` of them (None: all).

    Where there are more windows than are asked for, those taken lie evenly over the held-out part. The last
    batch may have fewer sequences, so weigh losses by tokens. Errors: as `count_windows`, at once.
    """
    windows = count_windows(tokens, sequence_length, "held-out")
    taken = windows if limit is None else min(windows, limit * batch_size)
    window_N = np.arange(taken, dtype=np.int64) * windows // taken
    starts = range(0, taken, batch_size)
    return (_batch(tokens, window_N[start : start + batch_size], sequence_length) for start in starts)


def _batch(
    tokens: Tokens, window_B: NDArray[np.int64], sequence_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    start_B = window_B * sequence_length
    rows = np.empty((len(start_B), sequence_length + 1), dtype=np.int64)
    for row, start in zip(rows, start_B, strict=True):
        row[:] = tokens[start : start + sequence_length + 1]
    both_BT1 = torch.from_numpy(rows)
    return both_BT1[:, :-1].contiguous(), both_BT1[:, 1:].contiguous()
