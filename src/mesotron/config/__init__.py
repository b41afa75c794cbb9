"""Every config of the command line, as frozen dataclasses; the standard library only.

The string under a field is its help text, and its lines stay lines: break between sentences. A
field marked POSITIONAL may be given without its flag.
Names that live in a registry (filters, models) are checked by the registry's owner, not here.
"""

from mesotron.config.compare import CompareConfig, SweepConfig
from mesotron.config.evaluation import EvalConfig
from mesotron.config.fields import POSITIONAL, OptimizerName
from mesotron.config.filters import RouteConfig, SpectrumConfig
from mesotron.config.plan import PlanConfig
from mesotron.config.ppo import SnakeConfig
from mesotron.config.report import ReportConfig
from mesotron.config.sft import SftConfig
from mesotron.config.training import (
    ModelConfig,
    ObjectiveConfig,
    OptimConfig,
    RewardConfig,
    RolloutConfig,
    TaskConfig,
    TrainConfig,
)
from mesotron.config.vla import DemosConfig, WorldConfig
from mesotron.config.vla_training import (
    PartsOptimConfig,
    PolicyConfig,
    VlaEvalConfig,
    VlaTrainConfig,
)
from mesotron.config.watch import WatchConfig, WatchSettings

__all__ = [
    "POSITIONAL",
    "CompareConfig",
    "DemosConfig",
    "EvalConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimConfig",
    "OptimizerName",
    "PartsOptimConfig",
    "PlanConfig",
    "PolicyConfig",
    "ReportConfig",
    "RewardConfig",
    "RolloutConfig",
    "RouteConfig",
    "SftConfig",
    "SnakeConfig",
    "SpectrumConfig",
    "SweepConfig",
    "TaskConfig",
    "TrainConfig",
    "VlaEvalConfig",
    "VlaTrainConfig",
    "WatchConfig",
    "WatchSettings",
    "WorldConfig",
]
