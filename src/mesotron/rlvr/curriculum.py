"""A curriculum: the prompts of a run become harder when it succeeds often enough."""

import json
from collections import deque
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]
ROLLOUTS = 4  # rollout batches whose mean success rate decides


class Curriculum:
    """Replaces each row by that of the present level in the same place.

    Rows are replaced when they are used, not when the data loader reads ahead, and the level and
    the rates behind it are saved in checkpoints: a resumed run sees the same prompts.

    Args:
        pools: the rows of each level, easiest first, equally many of each.
        bound: success rate at which the level rises.
    """

    def __init__(self, pools: Sequence[Sequence[Row]], bound: float) -> None:
        size = min(map(len, pools))
        self.pools = [pool[:size] for pool in pools]
        self.bound = bound
        self.level = 0
        self.rates: deque[float] = deque(maxlen=ROLLOUTS)
        self._places = {row["id"]: k for k, row in enumerate(pools[0])}

    def place(self, rows: Sequence[Row]) -> list[Row]:
        pool = self.pools[self.level]
        return [{**row, **pool[self._places[row["id"]] % len(pool)]} for row in rows]

    def update(self, success: float) -> None:
        self.rates.append(success)
        is_sure = len(self.rates) == ROLLOUTS and sum(self.rates) / ROLLOUTS >= self.bound
        if is_sure and self.level < len(self.pools) - 1:
            self.level += 1
            self.rates.clear()

    def state_dict(self) -> dict[str, Any]:
        values = {"level": self.level, "rates": list(self.rates)}
        return {"tensors": {}, "values": json.dumps(values)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        values = json.loads(state_dict["values"])
        self.level = values["level"]
        self.rates = deque(values["rates"], maxlen=ROLLOUTS)
