"""Token files: our layout, and other programs' layouts."""
