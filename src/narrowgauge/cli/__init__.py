"""Which verbs does `narrowgauge` have? One thin function each."""
