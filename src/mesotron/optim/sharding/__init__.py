"""The sharded step: each matrix filtered once, on one rank.

`mesh` where shards lie, `agreement` what the ranks must know together, `exchange` who filters what
and which pieces travel, `step` the order of it all.
"""
