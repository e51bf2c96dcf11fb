"""The loss on held-out text: always the same batches, so that two numbers compare."""

import torch

from narrowgauge.data import Tokens, validation_batches
from narrowgauge.models import Transformer


@torch.no_grad()
def validation_loss(
    model: Transformer, tokens: Tokens, batch_size: int, sequence_length: int, batches: int | None
) -> float:
    """Mean cross entropy in nats per token over `batches` batches spread over the tokens; None = all."""
    device = next(model.parameters()).device
    total = count = 0.0
    for x_BT, y_BT in validation_batches(tokens, batch_size, sequence_length, batches):
        total += model.loss(x_BT.to(device), y_BT.to(device)).item() * y_BT.numel()
        count += y_BT.numel()
    return total / count
