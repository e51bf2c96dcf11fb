"""What is not there yet: each of these is reported as "not yet" and skipped, with its reason.

A key is a row of the table, the name of a test, or SEVERAL: every test that was given more than one rank.
`pytest --waiting` runs them all the same.
"""

SEVERAL = "several ranks"

WAITING: dict[str, str] = {}
