"""The sharded step: `exchange` plans who filters what, `step` runs it."""
