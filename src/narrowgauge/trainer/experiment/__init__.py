"""Experiments: arms, seeds and lengths as runs, what they will show, and the gate."""
