"""The text sample at the end of a run."""

from narrowgauge.checkpoint import load
from narrowgauge.models import generate
from narrowgauge.runs.loop.run_context import RunContext
from narrowgauge.training.step.build_model import model_of
from narrowgauge.training.step.train_state import TrainState

TOKENS = 160  # a paragraph; at most one a step, so that a sample never takes longer than the training


def sample_text(context: RunContext, state: TrainState) -> tuple[str, str]:
    """(prompt, continuation): text that the trained model generates on this process alone."""
    run, dataset, tokenizer = context.run, context.dataset, context.dataset.tokenizer
    prompt = run.prompt or tokenizer.decode(dataset.val.streams[0][1:9].tolist())  # the first held-out tokens
    ids = tokenizer.encode(prompt) or [tokenizer.end_of_document]
    model = state.model
    if context.coordinator.size > 1:  # the full model of the last step, on this process
        checkpoint = load(context.directory.checkpoints / f"step-{state.step}")
        model = model_of(state.plan, checkpoint, state.device)[1]
    new = generate(
        model, ids, min(TOKENS, run.plan.steps), temperature=0.7, top_k=40, seed=run.plan.spec.seed
    )
    return prompt, tokenizer.decode_after(ids, new)
