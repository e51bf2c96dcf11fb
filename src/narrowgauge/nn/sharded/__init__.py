"""How does a layer compute when several processes hold it together? Weights that travel, and shards."""
