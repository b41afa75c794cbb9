"""Benchmarks: the optimizer's step against its peers, and a small language model by each optimizer.

Both are commands (`mesotron bench optim`, `mesotron bench train`); their results and what did not
work are kept in benchmarks/ at the root of the repository.
"""
