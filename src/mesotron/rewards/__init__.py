"""Rewards: a weighted sum of named parts, each a number per completion, or None for no verdict.

`registry` says what a built-in part is, and `builtin/` has one file for each. `own` loads and calls
the functions of users. `call` sums the parts, and `check` tries a reward before training. `scorer`
and `votes` score whole groups.
"""
