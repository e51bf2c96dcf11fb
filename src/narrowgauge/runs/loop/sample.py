"""The sample of text at the end of a run."""

from narrowgauge.checkpoint import load
from narrowgauge.data import Dataset
from narrowgauge.guard.raises import raises_of
from narrowgauge.models import Transformer, generate
from narrowgauge.runs.loop.run_context import RunContext
from narrowgauge.training.config.config import Config
from narrowgauge.training.step.build_model import build_model, in_force, load_model
from narrowgauge.training.step.train_state import TrainState


def sample_text(context: RunContext, run: TrainState) -> tuple[str, str]:
    """(prompt, continuation): text that the trained model generates on this process alone."""
    section, tokenizer = context.config.log, context.dataset.tokenizer
    prompt = section.prompt or _fitting_prompt(context.config, context.dataset)
    ids = tokenizer.encode(prompt) or [tokenizer.end_of_document]
    seed = context.config.training.seed
    model = run.model if context.coordinator.size == 1 else _full_model(context, run.step)
    new = generate(model, ids, section.sample_tokens, temperature=0.7, top_k=40, seed=seed)
    return prompt, tokenizer.decode_after(ids, new)


def _full_model(context: RunContext, step: int) -> Transformer:
    """The full model of the checkpoint of a step on this process."""
    checkpoint = load(context.directory.checkpoints / f"step-{step}")
    config = in_force(context.config, raises_of(checkpoint.state), step)
    model = build_model(config.spec, context.device)
    load_model(model, config, checkpoint)
    return model.eval()


def _fitting_prompt(config: Config, dataset: Dataset) -> str:
    """A prompt for the data: a Python function for source text, else the first held-out tokens."""
    if config.data.source == "stdlib":
        return "def __init__(self"
    return dataset.tokenizer.decode(dataset.val.streams[0][1:9].tolist())
