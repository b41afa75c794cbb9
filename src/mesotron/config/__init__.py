"""Every config of the command line, as frozen dataclasses with their bounds and checks."""

from mesotron.config.optim import OptimConfig, OptimizerName, PartRule, PartsOptimConfig
from mesotron.config.ppo import SnakeConfig
from mesotron.config.tools import (
    ChatConfig,
    CompareConfig,
    DoctorConfig,
    EvalConfig,
    ExportConfig,
    LogKind,
    PlanConfig,
    ReportConfig,
    RewardCheckConfig,
    RouteConfig,
    SftConfig,
    SpectrumConfig,
    SweepConfig,
    WatchConfig,
    WatchSettings,
)
from mesotron.config.train import (
    PRICES,
    PRICES_AS_OF,
    SELF_LABELED,
    FormatName,
    GpuName,
    GuardName,
    ModelConfig,
    ObjectiveConfig,
    ObjectiveName,
    RewardConfig,
    RolloutConfig,
    RunWatchConfig,
    TaskConfig,
    TrainConfig,
    check_alert,
    parse_duration,
)
from mesotron.config.vla import (
    DemosConfig,
    Perturbation,
    PerturbationName,
    PolicyConfig,
    VlaEvalConfig,
    VlaTrainConfig,
    WorldConfig,
)

__all__ = [
    "PRICES", "PRICES_AS_OF", "SELF_LABELED", "ChatConfig", "CompareConfig", "DemosConfig",
    "DoctorConfig", "EvalConfig", "ExportConfig", "FormatName", "GpuName", "GuardName", "LogKind",
    "ModelConfig", "ObjectiveConfig", "ObjectiveName", "OptimConfig", "OptimizerName", "PartRule",
    "PartsOptimConfig", "Perturbation", "PerturbationName", "PlanConfig", "PolicyConfig",
    "ReportConfig", "RewardCheckConfig", "RewardConfig", "RolloutConfig", "RouteConfig",
    "RunWatchConfig", "SftConfig", "SnakeConfig", "SpectrumConfig", "SweepConfig", "TaskConfig",
    "TrainConfig", "VlaEvalConfig", "VlaTrainConfig", "WatchConfig", "WatchSettings",
    "WorldConfig", "check_alert", "parse_duration",
]  # fmt: skip
