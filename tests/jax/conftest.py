"""These tests need JAX and optax; they compile without optimizations."""

from importlib.util import find_spec

if find_spec("jax") and find_spec("optax"):
    from support.quick_jax import quick_compilation  # noqa: F401
else:
    collect_ignore_glob = ["test_*.py"]
