"""Token files: our layout, and those of other programs."""
