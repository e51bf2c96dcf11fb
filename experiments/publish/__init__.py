"""Makes the page of the project's own experiment, docs/evidence.md."""
