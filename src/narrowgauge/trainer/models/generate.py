"""Generates text: one token at a time, each drawn from the model's distribution over the next.

    logits / temperature  ->  the `top_k` likeliest  ->  the fewest of them that hold `top_p`  ->  a draw

With a cache of keys and values (`kv_cache.py`) each token costs one token's work; without it, the full
context runs through the model again for every token. Both compute the same values up to the order of sums, as
long as a layer's result for a token depends on that token alone. Under a recipe with one scale for all tokens
of a batch it does not, and only generation without a cache computes what training computes.

The cache ends when the context is full: then the window slides, every position changes, and the window is
recomputed for each token.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.models.kv_cache import KVCache
from narrowgauge.trainer.models.transformer import Transformer


@torch.no_grad()
def generate(
    model: Transformer,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    stop_id: int | None = None,
    top_p: float = 1.0,
    cache: bool = True,
) -> list[int]:
    """Continue a prompt.

    Args:
        model: The model.
        prompt_ids: Token ids; the model sees at most the last `max_sequence_length` of them.
        max_new_tokens: The maximum number of tokens to return.
        temperature: The divisor of the logits; 0 takes the likeliest token each time.
        top_k: The number of likeliest tokens to draw among; None for all.
        seed: The seed of the draws: the same seed gives the same text.
        stop_id: The token that ends the text when it is drawn; it is not returned.
        top_p: Draw among the fewest tokens whose probabilities add up to this.
        cache: Whether to keep keys and values of earlier tokens.

    Returns:
        The new token ids only.

    Raises:
        UserError: The prompt is empty, an id is outside the vocabulary, a setting is outside its range, or
            the logits are not finite.
    """
    limit, vocab_size = model.config.max_sequence_length, model.config.vocab_size
    outside = next((i for i in prompt_ids if not 0 <= i < vocab_size), None)
    rules = (
        (
            prompt_ids,
            "the prompt is empty, but the model continues text; give at least one token, such as "
            "the tokenizer's end-of-document token",
        ),
        (
            outside is None,
            f"token id {outside} of the prompt is outside the model's vocabulary of "
            f"{vocab_size}; use the tokenizer that the model was trained with",
        ),
        (max_new_tokens >= 0, f"max_new_tokens = {max_new_tokens} must not be negative; 0 asks for nothing"),
        (
            0 <= temperature < float("inf"),
            f"temperature = {temperature} must be finite and not negative; 0 is greedy, 1 is plain",
        ),
        (
            top_k is None or top_k >= 1,
            f"top_k = {top_k} must be at least 1; leave it out to draw among all tokens",
        ),
        (0 < top_p <= 1, f"top_p = {top_p} must be above 0 and at most 1; 1 draws among all tokens"),
        (0 <= seed < 2**63, f"seed = {seed} must lie in 0 to 2^63 - 1"),
    )
    if broken := [rule for holds, rule in rules if not holds]:
        raise UserError(broken[0])
    device = model.embedding.weight.device
    generator = torch.Generator("cpu").manual_seed(seed)
    ids = list(prompt_ids)
    kept: list[KVCache] | None = None
    for _ in range(max_new_tokens):
        new = ids[-limit:]
        if not cache or len(ids) > limit:
            kept = None
        elif kept is None:
            kept = [KVCache(min(limit, len(ids) + max_new_tokens)) for _ in model.blocks]
        else:
            new = ids[-1:]
        hidden_BTD = model.hidden(torch.tensor([new], device=device), cache=kept)
        last_V = model.head(hidden_BTD[:, -1:]).flatten().float().cpu()
        chosen = _choose(last_V, temperature, top_k, top_p, generator)
        if chosen == stop_id:
            break
        ids.append(chosen)
    return ids[len(prompt_ids) :]


def _choose(
    logits_V: Tensor, temperature: float, top_k: int | None, top_p: float, generator: torch.Generator
) -> int:
    """Draw one token id, on the CPU, so that it does not depend on the device's generator."""
    if not logits_V.isfinite().all():
        raise UserError(
            "the model's logits are not finite, so nothing can be drawn; use an earlier checkpoint"
        )
    if temperature == 0:
        return int(logits_V.argmax())
    best = logits_V.topk(min(top_k or len(logits_V), len(logits_V)))
    # Subtracting the largest first keeps small temperatures from overflowing.
    probabilities = ((best.values - best.values[0]).double() / temperature).softmax(dim=0)
    if top_p < 1:
        likelier = probabilities.cumsum(0) - probabilities  # the sum before each; 0 for the first
        probabilities = torch.where(likelier < top_p, probabilities, 0.0)
    return int(best.indices[torch.multinomial(probabilities, 1, generator=generator)])
