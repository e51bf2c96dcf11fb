"""Recipes in other trainers: one file each, imported only on request.

Each file imports the package that it is named after where it needs that package's classes; the rest of this
package imports none of them. `torchao` does not need the other package: it replaces it.
"""
