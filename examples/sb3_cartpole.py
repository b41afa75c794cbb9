"""Stable-Baselines3 PPO on CartPole with Muon as `optimizer_class`.

Stable-Baselines3 passes bare parameters, so the output layers are filtered too; for a routed
optimizer set `model.policy.optimizer = mesotron.muon(model.policy, ...)` after building.

Run: python examples/sb3_cartpole.py
"""

from stable_baselines3 import PPO
from stable_baselines3.common.evaluation import evaluate_policy

import mesotron


def main(timesteps: int = 4096) -> None:
    model = PPO(
        "MlpPolicy",
        "CartPole-v1",
        learning_rate=3e-3,
        n_steps=512,
        policy_kwargs={"optimizer_class": mesotron.Muon, "optimizer_kwargs": {"weight_decay": 0.0}},
        seed=0,
        device="cpu",
    )

    before, _ = evaluate_policy(model, model.get_env(), 10, deterministic=False)
    model.learn(timesteps)
    after, _ = evaluate_policy(model, model.get_env(), 10, deterministic=False)
    stats = model.policy.optimizer.stats()
    print(f"mean reward from {before:.0f} to {after:.0f} in {timesteps} steps of the environment")
    print(f"update RMS of the matrices {stats['muon/update_rms']:.2e}")


if __name__ == "__main__":
    main()
