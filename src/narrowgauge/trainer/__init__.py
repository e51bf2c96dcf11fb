"""The trainer: models, texts, runs, what they cost and what they showed, and the command.

The library beside this package (formats to conformance) needs torch and numpy, and imports nothing from here.
The trainer may depend on well-kept packages.
"""
