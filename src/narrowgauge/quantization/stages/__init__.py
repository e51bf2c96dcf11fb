"""The stages of a cast: each file holds one stage's record, rules, passes and oracle."""
