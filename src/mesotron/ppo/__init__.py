"""PPO in pure JAX (Schulman et al. 2017, arXiv 1707.06347): Snake, a transformer, Muon and Pion.

Needs the extra `ppo` (jax, optax, jumanji, orbax).
"""
