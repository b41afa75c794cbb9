"""Addresses that the watch reads, one file for each scheme; see `mesotron.watch.address`."""
