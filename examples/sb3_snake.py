"""Stable-Baselines3 PPO plays Snake with Muon or Pion: the same game and network as `mesotron ppo`.

Stable-Baselines3 sets one learning rate for all groups; under the default unit AdamW's rate carries
over to the matrices, so one is enough. Its own optimizer is replaced after building, which routes
the network: matrices to Muon or Pion, the rest to AdamW.

Run from the root of a clone: python -m examples.sb3_snake
"""

import tyro

import mesotron
from benchmarks._lib.snake_sb3 import ENDS, make_sb3
from mesotron.config import SnakeConfig

# Random play among legal moves eats this many on 4x4, out of 15.
RANDOM_FRUIT = 7.33


def main(
    optim: str = "muon",
    lr: float = 3e-3,
    timesteps: int = 24_576,
    width: int = 4,
    seed: int = 0,
) -> None:
    board = {"width": width, "height": width}
    config = SnakeConfig(
        **board,
        total_timesteps=timesteps,
        lr=lr,
        anneal_lr=False,
        seed=seed,
    )

    model = make_sb3(config, device="cpu")
    network = model.policy.network
    if optim != "adam":
        build = {"muon": mesotron.muon, "pion": mesotron.pion}[optim]
        strength = {"cutoff": "aligned"} if optim == "pion" else {}
        model.policy.optimizer = build(
            network,
            lr=lr,
            weight_decay=0.0,
            overrides=ENDS,
            **strength,
        )

    before = play(model, config)
    model.learn(timesteps)
    after = play(model, config)
    print(
        f"fruit a game from {before:.2f} to {after:.2f} of {config.most_fruit} in {timesteps} steps"
    )

    if width == 4:
        print(f"random among legal moves: {RANDOM_FRUIT}")

    if optim != "adam":
        stats = model.policy.optimizer.stats()
        print(f"update RMS of the matrices {stats[f'{optim}/update_rms']:.2e}")


def play(model, config: SnakeConfig) -> float:
    """Mean fruit of the games that end within the longest one's time; moves are sampled."""
    env = model.get_env()
    seen = env.reset()

    scores = []
    for _ in range(config.time_limit):
        actions, _ = model.predict(seen, deterministic=False)
        seen, _, dones, infos = env.step(actions)
        scores += [info["episode"]["r"] for info, done in zip(infos, dones) if done]

    return sum(scores) / max(len(scores), 1)


if __name__ == "__main__":
    tyro.cli(main)
