"""The rules for matrices, one file each: what `mesotron.optim.registry` calls a `Rule`."""
