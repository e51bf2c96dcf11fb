"""The verbs of `narrowgauge`, one thin function each."""
