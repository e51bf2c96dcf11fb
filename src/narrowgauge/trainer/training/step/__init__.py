"""One optimizer step, and its judgement."""
