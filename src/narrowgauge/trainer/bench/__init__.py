"""The speed of a step, its floor on this machine, and the speed of peers."""
