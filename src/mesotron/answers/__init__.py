"""Reading an answer from a completion and comparing it with the gold answer."""
