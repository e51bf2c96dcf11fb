"""The functions of the verbs that Python does not have: a module for similar verbs."""
