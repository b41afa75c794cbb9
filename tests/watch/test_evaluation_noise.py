"""What the corpora of runs taught the tracks: evaluation noise and early falls."""

import json
import math

import pytest

from mesotron.watch import Engine
from mesotron.watch.tracks import Track


def test_the_noise_of_an_evaluation_is_that_of_its_problems():
    track = Track(warmup=1, window=1)
    for accuracy in (0.26, 0.45, 0.44):  # learning is not noise
        track.add(accuracy)
    assert track.noise > 0.1
    engine = Engine()
    for step, accuracy in enumerate((0.26, 0.45, 0.44)):
        engine.update({"step": step, "eval/greedy": accuracy, "eval/problems": 100})
    assert engine.tracks["heldout"].noise == pytest.approx(math.sqrt(0.45 * 0.55 / 100))
    again = Engine()
    again.load_values(json.loads(json.dumps(engine.values())))
    assert again.tracks["heldout"].noise == engine.tracks["heldout"].noise


@pytest.mark.parametrize(("problems", "stopped"), [(20, False), (400, True)])
def test_a_few_problems_more_or_less_stop_no_run(problems, stopped):
    engine, events = Engine(), []
    for step, accuracy in enumerate((0.4, 0.45, 0.45, 0.3)):
        events += engine.update({"step": step, "eval/greedy": accuracy, "eval/problems": problems})
    assert [event.severity for event in events if event.detector == "accuracy_collapse"] == (
        ["stop"] if stopped else []
    )


def test_a_fall_in_the_first_rows_is_remembered():
    track = Track(warmup=10, window=5)
    for value in [0.4] * 10 + [0.0] * 60:
        track.add(value)
    long = track.look(1)
    assert long.best < 0.4
    assert long.reference("best") == pytest.approx(0.4)
