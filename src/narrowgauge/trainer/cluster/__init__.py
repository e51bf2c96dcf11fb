"""Plan a run, start it on a cluster, measure its scaling and check a machine."""
