"""The command `narrowgauge`: a verb is a function of `laboratory`, also of Python, or of `verbs`."""
