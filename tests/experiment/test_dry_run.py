"""The steps that a dry run times: few micro-batches, which the machine computes in seconds."""

from narrowgauge.trainer.experiment.run import shortened
from narrowgauge.trainer.models import flops_per_token
from narrowgauge.trainer.training import make_config


def config_of(model, batch_size, micro_batch_size, length=1024):
    sizes = {"batch_size": batch_size, "micro_batch_size": micro_batch_size, "device": "cpu", "threads": 1}
    return make_config({"model": {"name": model}, "training": sizes, "data": {"sequence_length": length}})


def flop(config):
    """The floating-point operations of one step."""
    length = config.data.sequence_length
    return config.training.batch_size * length * flops_per_token(config.spec.model, length)


def test_a_step_of_a_large_model_is_cut_to_a_few_whole_micro_batches():
    for model, size in [("gpt3-345m", 1), ("gpt2-124m", 2)]:
        short = shortened(config_of(model, 512, 4))
        assert (short.training.batch_size, short.training.micro_batch_size) == (size, size)
        assert short.spec.batch_size == size
        assert flop(short) < 4e12
    short = shortened(config_of("debug", 4096, 8, length=256))
    assert short.training.micro_batch_size == 8
    assert 1 < short.training.batch_size // 8 < 512
    assert 1e12 < flop(short) <= 2e12
    small = config_of("debug", 16, 8, length=256)
    assert shortened(small) == small
