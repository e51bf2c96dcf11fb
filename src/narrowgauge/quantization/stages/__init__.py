"""The stages of a cast: each file holds the record of one, its rules, its passes, and its oracle by hand."""
