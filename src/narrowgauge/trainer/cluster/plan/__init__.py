"""Plans what a run needs and how fast it will be."""
