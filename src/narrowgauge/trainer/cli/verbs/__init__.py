"""The functions of the verbs: a module for each verb, or for similar verbs."""
