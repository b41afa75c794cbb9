"""PPO in pure JAX (Schulman et al. 2017, arXiv 1707.06347): Snake, a transformer, Muon and Pion.

To understand it, read `loop` top to bottom; `training` is the command around it.
"""

from mesotron.ppo.evaluate import make_evaluation
from mesotron.ppo.loop import make_train
from mesotron.ppo.optimizer import Hyper
from mesotron.ppo.program import make_program
from mesotron.ppo.training import run

__all__ = ["Hyper", "make_evaluation", "make_program", "make_train", "run"]
