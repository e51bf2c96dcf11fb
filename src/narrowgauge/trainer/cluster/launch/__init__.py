"""Scripts that start a run on a cluster."""
