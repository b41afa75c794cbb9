"""What the numbers of an objective may be, whatever its name; refused before anything is loaded.

What contradicts an objective's name is refused where the name is resolved, in `options`.
"""

from math import inf, isfinite

from mesotron.config.training import ObjectiveConfig

# Of prompts for each that trains. All are sampled at once: where fewer than one group in a hundred
# teaches, further rounds or other problems are the way.
MOST_OVERSAMPLE = 100
# Fields that must be finite numbers where they are given; a beta below 0 pushes from the start.
FINITE = ("beta", "entropy_bonus", "entropy_target", "dynamic_oversample", "dynamic_tolerance")
SHARES = ("momentum", "min_vote_share")
WIDTHS = ("epsilon", "epsilon_high")


def refuse_numbers(given: ObjectiveConfig) -> None:
    """Refuse a number that no objective can have.

    Args:
        given: resolved or not; None was not given, and passes.

    Raises:
        ValueError: naming the number and the way out.

    Example:
        >>> refuse_numbers(ObjectiveConfig(momentum=0.999))
    """
    for name in FINITE:
        number = getattr(given, name)
        if number is not None and not isfinite(number):
            raise ValueError(f"objective.{name} = {number} is no amount: give a finite number")
    for name in SHARES:
        share = getattr(given, name)
        if not 0 <= share <= 1:
            raise ValueError(f"objective.{name} = {share} is a share: give a number from 0 to 1")
    for name in WIDTHS:
        width = getattr(given, name)
        if width is not None and not width > 0:
            raise ValueError(
                f"objective.{name} = {width} is no clip width: give a number above 0, or leave it "
                "out"
            )
    k = given.entropy_filter
    if k != "off" and not 0 <= k < inf:
        raise ValueError(
            f"objective.entropy_filter = {k} must be 0 or more, and finite: give 0.75 as "
            "published, or off"
        )
    _refuse_entropy(given)
    _refuse_dynamic(given)


def _refuse_entropy(given: ObjectiveConfig) -> None:
    if given.entropy_bonus < 0:
        raise ValueError(
            f"objective.entropy_bonus = {given.entropy_bonus} would pay for certainty: give 0 or "
            "more"
        )
    if given.entropy_target is not None and given.entropy_target <= 0:
        raise ValueError(
            f"objective.entropy_target = {given.entropy_target} is never undercut: give nats above "
            "0, such as 0.3, or leave it out"
        )


def _refuse_dynamic(given: ObjectiveConfig) -> None:
    if given.dynamic_tolerance < 0:
        raise ValueError(
            f"objective.dynamic_tolerance = {given.dynamic_tolerance:g} would call no group alike, "
            "not even one of equal rewards: give 0 or more"
        )
    rounds, usual = given.dynamic_max_rounds, ObjectiveConfig().dynamic_max_rounds
    if rounds < 1:
        raise ValueError(
            f"objective.dynamic_max_rounds = {rounds} would sample nothing: give 1 or more"
        )
    if rounds != usual and given.dynamic_sampling != "resample":
        raise ValueError(
            f"objective.dynamic_max_rounds = {rounds} is for dynamic_sampling resample: give both"
        )
    more = given.dynamic_oversample
    if more < 1:
        raise ValueError(
            f"objective.dynamic_oversample = {more} would sample fewer prompts than train: give 1 "
            "or more"
        )
    if more > MOST_OVERSAMPLE:
        raise ValueError(
            f"objective.dynamic_oversample = {more:g} would sample {more:g} prompts at once for "
            f"each that trains: give {MOST_OVERSAMPLE} or less, or more dynamic_max_rounds"
        )
    if more > 1 and given.dynamic_sampling != "resample":
        raise ValueError(
            f"objective.dynamic_oversample = {more} is for dynamic_sampling resample: give both"
        )
    if given.dynamic_choice == "widest" and more == 1:
        raise ValueError(
            "objective.dynamic_choice = widest needs more groups than places: give "
            "dynamic_oversample above 1 too"
        )
