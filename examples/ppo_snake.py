"""PPO on Snake as one pure function, and the game that it learned.

    python examples/ppo_snake.py

Two minutes on a CPU core. Needs the extra `ppo`; `mesotron ppo snake` does the same with a run
folder, checkpoints and several seeds.
"""

import jax

from mesotron.config import SnakeConfig
from mesotron.ppo import make_evaluation, make_train


def main(timesteps: int = 120_000, games: int = 64) -> None:
    config = SnakeConfig(
        width=4, height=4, optim="muon", total_timesteps=timesteps, eval_episodes=games
    )
    train = jax.jit(make_train(config))
    state, metrics = train(jax.random.PRNGKey(0))

    fruit = metrics["episode/fruit"]
    print(f"fruit from {fruit[0]:.2f} to {fruit[-1]:.2f} a training game, {len(fruit)} updates")

    most = config.width * config.height - 1
    runs = jax.tree.map(lambda X: X[None], state.params)  # of one run
    for how, played in make_evaluation(config)(runs, 0).items():
        print(f"{how}: {played.fruit.mean():.2f} of {most} fruit a game")


if __name__ == "__main__":
    main()
