"""How is a question asked from Python? One function for each, which returns a `Result`; verbs call them."""
