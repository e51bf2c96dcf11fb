"""A small model with its initial weights, for the tests of models."""

from narrowgauge.trainer.models import Transformer, initialize, model_config

# Published initial weights, under which every token is about as likely at first.
SIZES = {"dim": 64, "layers": 2, "ffn_dim": 96, "vocab_size": 61}
SIZES |= {"max_sequence_length": 32, "initial_std": 0.02}


def built(name="debug", seed=0, **changes):
    model = Transformer(model_config(name, **(SIZES | changes)))
    initialize(model, seed)
    return model
