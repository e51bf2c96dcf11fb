"""The loss on held-out text: always the same batches, so that two numbers compare."""

import torch

from narrowgauge.data import Mixture, Tokens, validation_batches
from narrowgauge.models import Transformer


@torch.no_grad()
def validation_loss(
    model: Transformer,
    tokens: Mixture | Tokens,
    batch_size: int,
    sequence_length: int,
    batches: int | None,
    apart: bool = False,
) -> float:
    """Mean cross entropy in nats per token over `batches` batches spread over the tokens; None = all.

    `apart`: documents are kept apart, as `data.separate_documents` has it in training.
    """
    device = next(model.parameters()).device
    total = count = 0.0
    for on_host in validation_batches(tokens, batch_size, sequence_length, batches, apart):
        batch = on_host.to(device)
        targets = batch.targets if batch.ignores else None
        loss = model.loss(batch.x_BT, batch.y_BT, batch.position_BT, targets)
        total += loss.item() * batch.targets
        count += batch.targets
    return total / count
