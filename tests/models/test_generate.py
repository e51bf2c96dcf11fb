"""Generation: which token is drawn, with a cache and without, and what cannot be done."""

import pytest
import torch

from models.built import built
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.models import generate


@pytest.fixture(params=["debug", "gpt2-debug"])
def model(request):
    model = built(request.param)
    with torch.no_grad():
        model.norm.weight.mul_(5)  # far from uniform, so that the choices are worth testing
    return model


def test_greedy_takes_the_likeliest_token_each_time(model):
    ids = [1, 2, 3]
    text = generate(model, ids, 10, temperature=0)
    assert len(text) == 10
    for token in text:
        assert token == int(model(torch.tensor([ids]))[0, -1].argmax())
        ids.append(token)
    greedy = generate(model, [7], 5, temperature=0)
    for settings in ({"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-30}):
        assert generate(model, [7], 5, **settings) == greedy, settings


def test_the_seed_decides_the_text_and_the_stop_id_ends_it(model):
    a, b, c = (generate(model, [1, 2], 20, seed=seed) for seed in (3, 3, 4))
    assert a == b
    assert a != c
    assert generate(model, [1, 2], 20, seed=3, stop_id=a[6]) == a[: a.index(a[6])]
    assert generate(model, [1], 0) == []


def test_top_k_draws_among_the_likeliest_only(model):
    best = model(torch.tensor([[7]]))[0, -1].topk(3).indices.tolist()
    drawn = {generate(model, [7], 1, temperature=50.0, top_k=3, seed=seed)[0] for seed in range(60)}
    assert drawn == set(best)
    assert generate(model, [7], 5, top_k=1000) == generate(model, [7], 5)


@pytest.mark.tier("thorough")
def test_top_p_draws_among_the_fewest_that_hold_it(model):
    p, ids = model(torch.tensor([[7]]))[0, -1].softmax(0).sort(descending=True)
    for top_p in (0.05, 0.3, 0.6):
        count = int((p.cumsum(0) < top_p).sum()) + 1
        drawn = {generate(model, [7], 1, top_p=top_p, seed=seed)[0] for seed in range(200)}
        assert drawn <= set(ids[:count].tolist())
        assert len(drawn) > count / 2


@pytest.mark.parametrize("length", [1, 30, 50])
def test_with_a_cache_the_text_is_the_same(model, length):
    """To the token, also where the context is full and the window slides: the last tokens that fit."""
    prompt = [i % 61 for i in range(length)]
    for settings in ({"temperature": 0}, {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "seed": 3}):
        kept = generate(model, prompt, 40, **settings)
        assert kept == generate(model, prompt, 40, cache=False, **settings)
        assert kept == generate(model, prompt[-32:], 40, **settings)


#: A prompt, settings, and how the sentence begins.
MISTAKES = [
    ([], {}, "the prompt is empty, but the model continues text; give at least one token"),
    ([3, 61], {}, "token id 61 of the prompt is outside the model's vocabulary of 61; use the tokenizer"),
    ([3], {"temperature": -1.0}, "temperature = -1.0 must be finite and not negative"),
    ([3], {"top_p": 0.0}, "top_p = 0.0 must be above 0 and at most 1"),
    ([3], {"top_k": 0}, "top_k = 0 must be at least 1"),
    ([3], {"max_new_tokens": -1}, "max_new_tokens = -1 must not be negative"),
]


def test_what_cannot_be_done_is_refused_in_a_sentence(model):
    for prompt, settings, sentence in MISTAKES:
        with pytest.raises(UserError) as error:
            generate(model, prompt, **({"max_new_tokens": 5} | settings))
        assert str(error.value).startswith(sentence)
    with torch.no_grad():
        model.norm.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="logits are not finite"):
        generate(model, [1], 1)
