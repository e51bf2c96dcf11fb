"""How is a question put to training? Arms, seeds and lengths as runs, what they will show, and the gate."""
