"""How does a recipe get into the trainers of others? One file each; none is imported before it is asked for.

Each file imports the package that it is named after where it needs that package's classes, and nothing of
this package imports any of them. `torchao` needs no other package: it stands in for one.
"""
