"""The settings of a run and the rules that values must satisfy."""
