"""What is not there yet: each of these is reported as "not yet" and skipped, with its reason.

A key is a row of the table, the name of a test, or SEVERAL: every test that was given more than one rank.
`pytest --waiting` runs them all the same.
"""

SEVERAL = "several ranks"

WAITING: dict[str, str] = {
    SEVERAL: "training on several ranks is being built",
    "A4": "workers do not die with their launcher yet",
    "A9": "saves are not asynchronous yet",
    "test_a_change_that_is_allowed_by_name_is_made_and_told": "--allow-change is being built",
}
