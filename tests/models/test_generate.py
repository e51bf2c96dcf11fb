import pytest
import torch

from narrowgauge.errors import UserError
from narrowgauge.models import KVCache, Transformer, generate, initialize, model_config

TINY = {
    "dim": 64,
    "layers": 2,
    "ffn_dim": 96,
    "vocab_size": 61,
    "max_sequence_length": 32,
    "initial_std": 0.02,
}


@pytest.fixture(params=["debug", "gpt2-debug"])
def model(request):
    model = Transformer(model_config(request.param, **TINY))
    initialize(model, 0)
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


def test_the_seed_decides_the_text(model):
    a, b, c = (generate(model, [1, 2], 20, seed=seed) for seed in (3, 3, 4))
    assert a == b
    assert a != c


@pytest.mark.tier("thorough")
def test_draws_follow_the_models_distribution(model):
    context = [5, 9]
    with torch.no_grad():
        expected_V = (model(torch.tensor([context]))[0, -1] / 1.5).softmax(0)
    counts_V = torch.zeros(61)
    for seed in range(1500):
        counts_V[generate(model, context, 1, temperature=1.5, seed=seed)] += 1
    assert (counts_V / 1500 - expected_V).abs().sum() < 0.2


def test_top_k_draws_among_the_likeliest_only(model):
    best = model(torch.tensor([[7]]))[0, -1].topk(3).indices.tolist()
    drawn = {generate(model, [7], 1, temperature=50.0, top_k=3, seed=seed)[0] for seed in range(60)}
    assert drawn == set(best)
    assert generate(model, [7], 5, top_k=1) == generate(model, [7], 5, temperature=0)
    assert generate(model, [7], 5, top_k=1000) == generate(model, [7], 5)


@pytest.mark.parametrize("prompt", [[1], [1, 2, 3], list(range(30)), [i % 61 for i in range(50)]])
def test_with_a_cache_the_text_is_the_same(model, prompt):
    """To the token, also where the context is full and the window begins to slide."""
    for settings in ({"temperature": 0}, {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "seed": 3}):
        kept = generate(model, prompt, 40, **settings)
        assert kept == generate(model, prompt, 40, cache=False, **settings)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_cache_gives_the_logits_of_the_whole_context(groups):
    model = Transformer(model_config("debug", **(TINY | {"kv_heads": 4 // groups})))
    initialize(model, 1)
    ids = torch.randint(61, (2, 20), generator=torch.Generator().manual_seed(0))
    cache = KVCache(model.config, 20)
    with torch.no_grad():
        pieces = [ids[:, :7], *ids[:, 7:].split(1, dim=1)]
        logits = torch.cat([model.head(model.hidden(piece, cache=cache)) for piece in pieces], dim=1)
        assert (logits - model(ids)).abs().max() < 1e-6
    assert cache.length == 20


@pytest.mark.tier("thorough")
def test_top_p_draws_among_the_fewest_that_hold_it(model):
    p, ids = model(torch.tensor([[7]]))[0, -1].softmax(0).sort(descending=True)
    for top_p in (0.05, 0.3, 0.6):
        count = int((p.cumsum(0) < top_p).sum()) + 1
        drawn = {generate(model, [7], 1, top_p=top_p, seed=seed)[0] for seed in range(200)}
        assert drawn <= set(ids[:count].tolist())
        assert len(drawn) > count / 2
    assert generate(model, [7], 5, top_p=1e-9) == generate(model, [7], 5, temperature=0)


def test_tiny_temperature_is_greedy_and_does_not_overflow(model):
    assert generate(model, [7], 5, temperature=1e-30) == generate(model, [7], 5, temperature=0)


def test_the_context_is_the_last_tokens_that_fit(model):
    prompt = [i % 61 for i in range(50)]
    assert generate(model, prompt, 40, temperature=0) == generate(model, prompt[-32:], 40, temperature=0)


def test_stop_id_ends_the_text_and_is_not_part_of_it(model):
    text = generate(model, [1], 20, seed=1)
    stop = text[6]
    assert generate(model, [1], 20, seed=1, stop_id=stop) == text[: text.index(stop)]


def test_nothing_asked_for_gives_nothing(model):
    assert generate(model, [1], 0) == []


@pytest.mark.parametrize(
    ("prompt", "settings", "sentence"),
    [
        (
            [],
            {},
            "the prompt is empty, but the model continues text; give at least one token, such as the "
            "tokenizer's end-of-document token",
        ),
        (
            [3, 61],
            {},
            "token id 61 of the prompt is outside the model's vocabulary of 61; use the tokenizer that the "
            "model was trained with",
        ),
        (
            [3],
            {"temperature": -1.0},
            "temperature = -1.0 must be finite and not negative; 0 is greedy, 1 is plain",
        ),
        ([3], {"top_p": 0.0}, "top_p = 0.0 must be above 0 and at most 1; 1 draws among all tokens"),
        ([3], {"top_k": 0}, "top_k = 0 must be at least 1; leave it out to draw among all tokens"),
        (
            [3],
            {"max_new_tokens": -1},
            "max_new_tokens = -1 must not be negative; 0 asks for nothing",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_sentence(model, prompt, settings, sentence):
    with pytest.raises(UserError) as error:
        generate(model, prompt, **({"max_new_tokens": 5} | settings))
    assert str(error.value) == sentence


def test_a_broken_model_is_refused(model):
    with torch.no_grad():
        model.norm.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="logits are not finite"):
        generate(model, [1], 1)
