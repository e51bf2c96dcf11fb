"""The resources that a run needs, and what it reports."""
