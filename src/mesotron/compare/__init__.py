"""Fair comparisons: a tournament of optimizers and objectives, and sweeps of a run's numbers.

A cell is one run in one process; everything that is said about it is read from its run folder.
"""
