"""Studies and their shared tools; run from the root of a clone: `python -m benchmarks.STUDY`."""
