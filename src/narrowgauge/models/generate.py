"""Text from a model: one token at a time, each drawn from the model's distribution over the next.

The whole context runs through the model for every token. A cache of keys and values would save most of that
work, but would be a second way to compute attention; at the sizes where one looks at samples while training,
the plain way is fast enough, and it shows the very numbers that training computes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from narrowgauge.errors import UserError
from narrowgauge.models.transformer import Transformer


@torch.no_grad()
def generate(
    model: Transformer,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    stop_id: int | None = None,
) -> list[int]:
    """Continues `prompt_ids`; returns the new token ids only, at most `max_new_tokens` of them.

    `temperature` 0 takes the likeliest token each time; `top_k` draws among that many likeliest ones. Drawing
    `stop_id` ends the text, and it is not returned. The same seed gives the same text. The model sees no more
    than the last `max_sequence_length` tokens, so a longer prompt is cut at its front.

    Raises UserError for an empty prompt, ids outside the vocabulary, settings outside their range, and a
    model whose logits are not finite.
    """
    config = model.config
    _require_valid(prompt_ids, config.vocab_size, max_new_tokens, temperature, top_k)
    if not 0 <= seed < 2**63:
        raise UserError(f"seed = {seed} must lie in 0 to 2^63 - 1")
    device = model.embedding.weight.device
    generator = torch.Generator("cpu").manual_seed(seed)
    ids = list(prompt_ids)
    for _ in range(max_new_tokens):
        context_BT = torch.tensor([ids[-config.max_sequence_length :]], device=device)
        last_V = model.head(model.hidden(context_BT)[:, -1:]).flatten().float().cpu()
        chosen = _choose(last_V, temperature, top_k, generator)
        if chosen == stop_id:
            break
        ids.append(chosen)
    return ids[len(prompt_ids) :]


def _choose(logits_V: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """One token id. The draw is made on the CPU, so that it does not depend on the device's generator."""
    if not logits_V.isfinite().all():
        raise UserError(
            "the model's logits are not finite, so nothing can be drawn; use an earlier checkpoint"
        )
    if temperature == 0:
        return int(logits_V.argmax())
    best = logits_V.topk(min(top_k or len(logits_V), len(logits_V)))
    # Subtracting the largest first keeps small temperatures from overflowing.
    probabilities = ((best.values - best.values[0]).double() / temperature).softmax(dim=0)
    return int(best.indices[torch.multinomial(probabilities, 1, generator=generator)])


def _require_valid(
    prompt_ids: Sequence[int], vocab_size: int, max_new_tokens: int, temperature: float, top_k: int | None
) -> None:
    if not prompt_ids:
        raise UserError(
            "the prompt is empty, but the model continues text; give at least one token, "
            "such as the tokenizer's end-of-document token"
        )
    outside = [i for i in prompt_ids if not 0 <= i < vocab_size]
    if outside:
        raise UserError(
            f"token id {outside[0]} of the prompt is outside the model's vocabulary of {vocab_size}; "
            f"use the tokenizer that the model was trained with"
        )
    if max_new_tokens < 0:
        raise UserError(f"max_new_tokens = {max_new_tokens} must not be negative; 0 asks for nothing")
    if not 0 <= temperature < float("inf"):
        raise UserError(
            f"temperature = {temperature} must be finite and not negative; 0 is greedy, 1 is plain"
        )
    if top_k is not None and top_k < 1:
        raise UserError(f"top_k = {top_k} must be at least 1; leave it out to draw among all tokens")
