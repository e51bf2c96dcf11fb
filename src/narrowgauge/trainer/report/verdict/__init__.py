"""Which run is better, and by how much."""
