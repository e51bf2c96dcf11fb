"""How is a command line read? Parsers, options that verbs share, help, completion."""
