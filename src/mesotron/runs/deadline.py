"""Ends what does not end by itself when a run reaches its limit."""


class LimitReached(KeyboardInterrupt):
    """An interrupt of the main thread by the run's own limit."""
