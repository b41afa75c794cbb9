"""One step of GRPO, from prompts to a loss. Read it from top to bottom.

    rollout = sample(rows)                                 prompts, completions, their tokens
    sequences = pad(rollout, padding)                      the same as tensors
    scored = score(rollout, rows, scoring)                 a reward for each completion
    advantages = compute_advantages(scored, scaling)       how much better than its group
    batch = make_batch(sequences, scored, advantages)      and the tokens that train
    passed = policy(batch)                                 log-probabilities of today
    output = compute_loss(passed, batch, settings)         a scalar and its metrics

`training_loss` is these lines. `trl_trainer` runs the first five once for a rollout, and the last
two for each of its micro-batches.

Legend: P prompts and G completions of each, over all W processes; N = P G. B = N / W completions
of this process, with prompts of up to S and completions of up to T tokens. K reward functions.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from mesotron.answers.facts import Facts, Judge, summarise
from mesotron.probes import (
    answer_diversity,
    group_signal,
    group_spreads,
    repetition,
    trajectory_entropy,
)
from mesotron.rewards.call import completion_texts, is_unfinished
from mesotron.rewards.votes import (
    Ballots,
    VoteRules,
    label_accuracy,
    label_by_vote,
    low_entropy_outliers,
)
from mesotron.rlvr.objectives import Mean, Objective
from mesotron.tasks.gym import regrade

log = logging.getLogger("mesotron")
Item = TypeVar("Item")
Row = dict[str, Any]
TokenRows = Sequence[Sequence[int]]  # lists or arrays
Metrics = dict[str, float]

# Added to the standard deviation that advantages are divided by, as in TRL.
SPREAD_EPSILON = 1e-4
# The advantages are computed in float32: the squares of larger rewards leave nothing of others.
MAX_REWARD = 1e6
TOO_LARGE = f"rewards beyond +-{MAX_REWARD:g} are clipped to that: scale the reward function down"


def identity(x: Any) -> Any:
    return x


@dataclass(frozen=True, kw_only=True)
class Processes:
    """The processes of a run, and how values of all of them come together; alone by default."""

    rank: int = 0
    size: int = 1
    gather: Callable[[Tensor], Tensor] = identity  # rows of all processes, equally many of each
    gather_ragged: Callable[[Tensor], Tensor] = identity  # 1-D, of any length in each process
    gather_objects: Callable[[list[Any]], list[Any]] = identity

    def own(self, values: Any, number: int) -> Any:
        """This process's `number` rows of values of all processes."""
        return values[self.rank * number : (self.rank + 1) * number]


ALONE = Processes()


# 1. The rollout


@dataclass(frozen=True)
class Voters:
    """The anchor's completions that only vote, and their prompts, of this process."""

    prompt_tokens: TokenRows = ()
    completion_tokens: TokenRows = ()


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """What was sampled for B rows. Nothing in here depends on a reward."""

    prompts: Sequence[Any]  # B texts or chats
    completions: Sequence[Any]  # B texts or lists of messages
    prompt_tokens: TokenRows  # B, without padding
    completion_tokens: TokenRows  # B, with the end token if there is one
    written: TokenRows | None = None  # B, 1 on tokens that the policy wrote; None: on all
    sampler_logprobs: Sequence[Sequence[float | None]] | None = None  # by the program that sampled
    voters: Voters = Voters()


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """The tokens of a rollout as tensors."""

    prompt_ids: Tensor  # [B, S], padded on the left
    prompt_mask: Tensor  # [B, S], 0 on padding
    completion_ids: Tensor  # [B, T], padded on the right
    completion_mask: Tensor  # [B, T], 0 on padding
    sampler_logprobs: Tensor | None = None  # [B, T], NaN where the sampler gave none
    written: Tensor | None = None  # [B, T], 0 on what an environment replied; None: no replies

    @cached_property
    def ids(self) -> Tensor:
        return torch.cat([self.prompt_ids, self.completion_ids], dim=1)

    @cached_property
    def mask(self) -> Tensor:
        return torch.cat([self.prompt_mask, self.completion_mask], dim=1)

    @property
    def length(self) -> int:
        return self.completion_ids.shape[1]


@dataclass(frozen=True)
class Padding:
    """How rows of tokens become tensors."""

    token: int = 0
    device: torch.device | str = "cpu"
    multiple: int | None = None  # the width is rounded up to a multiple of this


def pad(rollout: Rollout, padding: Padding) -> Sequences:
    device = padding.device
    prompts = pad_rows(rollout.prompt_tokens, padding.token, "left", padding.multiple)
    completions = pad_rows(rollout.completion_tokens, padding.token, "right", padding.multiple)

    logprobs = None
    if rollout.sampler_logprobs is not None:
        rows = [np.asarray(row, dtype=np.float32) for row in rollout.sampler_logprobs]
        logprobs = pad_rows(rows, 0.0, "right", padding.multiple)[0].to(device)

    written = None
    if rollout.written is not None:
        written = pad_rows(rollout.written, 0, "right", padding.multiple)[0].to(device)

    return Sequences(
        prompt_ids=prompts[0].to(device),
        prompt_mask=prompts[1].to(device),
        completion_ids=completions[0].to(device),
        completion_mask=completions[1].to(device),
        sampler_logprobs=logprobs,
        written=written,
    )


def pad_rows(
    rows: Sequence[Any], value: float, side: str = "right", multiple: int | None = None
) -> tuple[Tensor, Tensor]:
    """Rows of numbers as one tensor [B, width], and a mask that is 0 on the padding.

    All rows are copied at once: a loop over 1,536 short rows takes a tenth of a step.

    Example:
        >>> pad_rows([[1, 2], [3]], 0, "left")[0].tolist()
        [[1, 2], [0, 3]]
    """
    dtype = np.float32 if isinstance(value, float) else np.int64
    arrays = [np.asarray(row, dtype=dtype) for row in rows]
    sizes = np.array([len(row) for row in arrays])[:, None]

    width = int(sizes.max())
    if multiple:
        width = -(-width // multiple) * multiple

    place = np.arange(width)
    inside = place < sizes if side == "right" else place >= width - sizes

    padded = np.full(inside.shape, value, dtype)
    padded[inside] = np.concatenate(arrays)

    return torch.from_numpy(padded), torch.from_numpy(inside.astype(np.int64))


def truncated(completion_tokens: TokenRows, end_ids: Sequence[int]) -> list[bool]:
    """Whether each completion reached the length limit: it does not end with an end token."""
    return [not len(tokens) or tokens[-1] not in end_ids for tokens in completion_tokens]


def without_truncated(sequences: Sequences, is_cut: Sequence[bool]) -> Sequences:
    """Masks completions that reached the length limit, attention included, as TRL does."""
    kept = ~torch.tensor(is_cut, device=sequences.completion_mask.device)
    return replace(sequences, completion_mask=sequences.completion_mask * kept[:, None].int())


# 2. Rewards


@dataclass(frozen=True, kw_only=True)
class Scored:
    """The rewards of the completions of all processes, and what they rest on."""

    rewards: Tensor  # [P, G], weighted totals; NaN where there is none
    tolerance: float  # rewards closer than this are equal
    by_function: Tensor | None = None  # [N, K]; NaN where a function gave none
    facts: Sequence[Facts] = ()  # N; empty without a judge
    dropped: Sequence[bool] = ()  # N, by the entropy filter; empty without one
    metrics: Metrics = field(default_factory=dict)  # of the votes and the filter

    def spreads(self) -> list[float]:
        return group_spreads(self.rewards, self.tolerance).tolist()

    def group_metrics(self) -> Metrics:
        """groups/*, and with facts also facts/* and answers/*."""
        if not self.facts:
            return group_signal(self.rewards, self.tolerance)

        G = self.rewards.shape[1]
        correct = None
        if any(fact.graded for fact in self.facts):
            correct = in_groups([fact.correct for fact in self.facts], G)

        answers = in_groups([fact.answer for fact in self.facts], G)
        signal = group_signal(self.rewards, self.tolerance, correct)

        return signal | summarise(self.facts) | answer_diversity(answers)


@dataclass(frozen=True, kw_only=True)
class EntropyFilter:
    """M-GRPO's filter: completions of unusually low entropy neither vote nor train."""

    k: float  # width in interquartile ranges
    entropies: Callable[[Rollout], Tensor]  # [rows], mean entropy of each completion


@dataclass(frozen=True)
class Dropped:
    """Completions that the entropy filter leaves out, over all processes."""

    own: list[bool] = field(default_factory=list)  # N
    voters: list[bool] = field(default_factory=list)
    metrics: Metrics = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """How completions are scored."""

    call: Callable[[list[Row], Rollout], Tensor]  # B annotated rows -> rewards [N, K]
    weights: Tensor  # [K]
    group_size: int  # G
    judge: Judge | None = None  # reads the answers; None for plain TRL rewards
    end_ids: Sequence[int] = ()  # the tokens that end a completion
    decode: Callable[[TokenRows], list[str]] | None = None  # of voters
    votes: VoteRules | None = None  # the first reward function is a vote, which is filled in here
    num_voters: int = 0  # of the anchor, for each prompt
    from_anchor: int = 0  # completions of each group that the anchor sampled
    entropy_filter: EntropyFilter | None = None
    tolerance: float = 1e-6
    seed: object = 0  # of tied votes
    world: Processes = ALONE


def score(rollout: Rollout, rows: Sequence[Row], how: Scoring) -> Scored:
    """Rewards by every function, votes included, of the completions of all processes."""
    annotated, facts = annotate(rollout, rows, how)
    rewards = bound_rewards(how.call(annotated, rollout))
    facts = how.world.gather_objects(facts)

    dropped = Dropped()
    metrics: Metrics = {}
    if how.votes is not None:
        dropped = drop_low_entropy(rollout, how)
        golds = how.world.gather_objects([row.get("gold") for row in rows])
        votes, metrics = vote(rollout, facts, golds, dropped, how)
        rewards = with_votes(rewards, votes)

    totals = weighted_total(rewards, how.weights)
    reads_answers = how.judge is None or how.judge.reads

    return Scored(
        rewards=totals.view(-1, how.group_size),
        tolerance=how.tolerance,
        by_function=rewards,
        facts=facts if reads_answers else (),
        dropped=dropped.own,
        metrics=dropped.metrics | metrics,
    )


def annotate(rollout: Rollout, rows: Sequence[Row], how: Scoring) -> tuple[list[Row], list[Facts]]:
    """Rows with the facts of their completions, for reward functions; and the facts."""
    judge = how.judge
    if judge is None:
        return list(rows), []

    is_cut = truncated(rollout.completion_tokens, how.end_ids)
    for k, completion in enumerate(rollout.completions):
        is_cut[k] = is_cut[k] or is_unfinished(completion)

    texts = completion_texts(rollout.completions)
    golds = [row.get("gold") for row in rows]
    facts = judge.judge(texts, golds, is_cut)

    columns = [row.get("columns") for row in rows]
    if any(columns):  # a task with a scorer of its own
        facts = regrade(facts, texts, columns, judge.format)

    annotated = []
    for row, fact in zip(rows, facts, strict=True):
        annotated.append({**row, "facts": fact, "truncated": fact.truncated, "row": row})

    return annotated, facts


def bound_rewards(rewards: Tensor) -> Tensor:
    """Rewards within +-MAX_REWARD, with a warning if one was not; NaN stays."""
    if bool((rewards.abs() > MAX_REWARD).any()):
        warn_once(TOO_LARGE)

    return rewards.clamp(-MAX_REWARD, MAX_REWARD)


@cache
def warn_once(message: str) -> None:
    log.warning(message)


def drop_low_entropy(rollout: Rollout, how: Scoring) -> Dropped:
    """Marks completions of unusually low entropy in their group, the anchor's votes included."""
    if how.entropy_filter is None:
        return Dropped()

    voters = rollout.voters
    number = len(rollout.completion_tokens)
    everyone = replace(
        rollout,
        prompt_tokens=[*rollout.prompt_tokens, *voters.prompt_tokens],
        completion_tokens=[*rollout.completion_tokens, *voters.completion_tokens],
    )
    entropies = how.entropy_filter.entropies(everyone)
    own = how.world.gather(entropies[:number]).view(-1, how.group_size)

    voted = own[:, :0]
    if len(voters.completion_tokens):
        gathered = how.world.gather(entropies[number:])
        voted = gathered[: len(own) * how.num_voters].view(len(own), -1)

    is_outlier = low_entropy_outliers(torch.cat([own, voted], dim=1), how.entropy_filter.k)
    share = is_outlier.float().mean().item()

    return Dropped(
        own=is_outlier[:, : how.group_size].flatten().tolist(),
        voters=is_outlier[:, how.group_size :].flatten().tolist(),
        metrics={"anchor/dropped": share},
    )


def vote(
    rollout: Rollout,
    facts: Sequence[Facts],
    golds: Sequence[str | None],
    dropped: Dropped,
    how: Scoring,
) -> tuple[list[float | None], Metrics]:
    """N rewards by majority vote (None where dropped), and votes/* metrics.

    A vote needs whole groups, and a group may span processes: facts and golds are of all of them.
    """
    assert how.judge is not None
    assert how.votes is not None
    G = how.group_size
    P = len(facts) // G
    voters = judge_voters(rollout.voters, P * how.num_voters, how)
    voters_each = len(voters) // P

    ballots = Ballots(
        policy=in_groups([fact.answer for fact in facts], G),
        anchor=in_groups([fact.answer for fact in voters], voters_each) or [[]] * P,
        dropped=in_groups(dropped.own, G),
        anchor_dropped=in_groups(dropped.voters, voters_each),
        from_anchor=how.from_anchor,
    )
    labels = label_by_vote(ballots, how.votes, how.seed)

    known = []
    for gold, fact in zip(golds[::G], facts[::G], strict=True):
        known.append(gold if fact.graded else None)

    correct = in_groups([fact.correct for fact in facts], G)
    accuracy = label_accuracy(labels, known, correct, how.judge.verifier)

    rewards = []
    for group in labels.rewards:
        rewards += group

    return rewards, labels.metrics | accuracy


def judge_voters(voters: Voters, number: int, how: Scoring) -> list[Facts]:
    """Facts of the anchor's completions of all processes, of which `number` count."""
    tokens = voters.completion_tokens
    if not len(tokens):
        return []

    assert how.decode is not None
    assert how.judge is not None
    is_cut = truncated(tokens, how.end_ids)
    judged = how.judge.judge(how.decode(tokens), [None] * len(tokens), is_cut)

    # Processes were given equally many, so the last ones are repeated.
    return how.world.gather_objects(judged)[:number]


def in_groups(items: Sequence[Item], size: int) -> list[list[Item]]:
    if size:
        return [list(items[k : k + size]) for k in range(0, len(items), size)]

    return []


def with_votes(rewards: Tensor, votes: Sequence[float | None]) -> Tensor:
    """Votes as the first column; a dropped completion gets no reward at all."""
    column = rewards.new_tensor([torch.nan if one is None else one for one in votes])
    filled = torch.cat([column[:, None], rewards[:, 1:]], dim=1)

    return filled.masked_fill(column.isnan()[:, None], torch.nan)


def weighted_total(rewards: Tensor, weights: Tensor) -> Tensor:
    """[N] from [N, K]; NaN where every function gave NaN."""
    total = (rewards * weights.to(rewards.device)).nansum(dim=1)
    return total.masked_fill(rewards.isnan().all(dim=1), torch.nan)


# 3. Advantages


@dataclass(frozen=True, kw_only=True)
class Advantages:
    values: Tensor  # [N], 0 where there is no reward
    spread: Tensor  # [N], the standard deviation that rewards were compared with


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """How rewards become advantages."""

    by: str = "group"  # "group", "batch" or "none": whose standard deviation divides them
    aggregation: str = "sum_then_normalize"  # of several reward functions; or normalize_then_sum
    weights: Tensor | None = None  # [K], for normalize_then_sum


def compute_advantages(scored: Scored, scaling: Scaling) -> Advantages:
    """How much better each completion is than its group; a completion without a reward gets 0."""
    if scaling.aggregation == "normalize_then_sum":
        return normalize_then_sum(scored, scaling)

    rewards = scored.rewards.flatten()
    G = scored.rewards.shape[1]
    mean = scored.rewards.nanmean(dim=1).repeat_interleave(G)

    if scaling.by == "batch":
        spread = nan_std(rewards).expand_as(rewards)
    else:
        spread = nan_std(scored.rewards, dim=1).repeat_interleave(G)

    values = rewards - mean
    if scaling.by != "none":
        values = values / (spread + SPREAD_EPSILON)

    return Advantages(values=values.nan_to_num(nan=0.0), spread=spread)


def normalize_then_sum(scored: Scored, scaling: Scaling) -> Advantages:
    """Each reward function is normalized in its group, then their weighted sum over the batch."""
    assert scored.by_function is not None
    assert scaling.weights is not None
    G = scored.rewards.shape[1]
    rewards = scored.by_function  # [N, K]
    groups = rewards.view(-1, G, rewards.shape[1])  # [P, G, K]

    spread = nan_std(groups, dim=1)[:, None]
    normalized = (groups - groups.nanmean(dim=1, keepdim=True)) / (spread + SPREAD_EPSILON)
    totals = weighted_total(normalized.view_as(rewards), scaling.weights)

    spread = nan_std(totals).expand_as(totals)
    values = (totals - totals.nanmean()) / (spread + SPREAD_EPSILON)

    return Advantages(values=values.nan_to_num(nan=0.0), spread=spread)


def nan_std(values: Tensor, dim: int = 0) -> Tensor:
    """Standard deviation with Bessel's correction of all but NaN.

    0 for a dimension of one, NaN where fewer than two are left.
    """
    if values.shape[dim] == 1:
        return torch.zeros_like(values.select(dim, 0))

    mean = values.nanmean(dim=dim, keepdim=True)
    variance = ((values - mean) ** 2).nanmean(dim=dim)
    count = (~values.isnan()).sum(dim=dim)

    correction = count / (count - 1)
    correction = torch.where(count > 1, correction, torch.nan)

    return (variance * correction).sqrt()


# 4. The batch that trains


@dataclass(frozen=True, kw_only=True)
class Batch(Sequences):
    """Completions with all that a loss needs, of this process."""

    loss_mask: Tensor  # [B, T], 1 on tokens that the policy wrote and that train
    advantages: Tensor  # [B]
    num_tokens: Tensor  # [], that train in the whole rollout, over all processes
    old_logprobs: Tensor | None = None  # [B, T], when it was sampled; None: those of today
    reference_logprobs: Tensor | None = None  # [B, T], for the KL term
    sampler_ratio: Tensor | None = None  # [B, T] or [B, 1], of the old policy to the sampler
    kept_tokens: Tensor | None = None  # [B, T, V / 8], bits: what top-k and top-p left
    images: Mapping[str, Any] = field(default_factory=dict)  # inputs of the model beside tokens

    def columns(self) -> dict[str, Tensor]:
        """What has a row for each completion."""
        named = {one.name: getattr(self, one.name) for one in fields(self)}
        return {k: x for k, x in named.items() if isinstance(x, Tensor) and x.ndim}

    def rows(self, part: slice) -> "Batch":
        return replace(self, **{name: x[part] for name, x in self.columns().items()})


def make_batch(
    sequences: Sequences,
    scored: Scored,
    advantages: Advantages,
    old_logprobs: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    sampler_ratio: Tensor | None = None,
    world: Processes = ALONE,
) -> Batch:
    """Joins tokens and advantages; completions that the filter dropped leave every mean."""
    B = len(sequences.completion_ids)
    mask = sequences.completion_mask
    if sequences.written is not None:
        mask = mask * sequences.written

    batch = Batch(
        prompt_ids=sequences.prompt_ids,
        prompt_mask=sequences.prompt_mask,
        completion_ids=sequences.completion_ids,
        completion_mask=sequences.completion_mask,
        sampler_logprobs=sequences.sampler_logprobs,
        loss_mask=mask,
        advantages=world.own(advantages.values, B),
        num_tokens=world.gather(mask.sum()).sum(),
        old_logprobs=old_logprobs,
        reference_logprobs=reference_logprobs,
        sampler_ratio=sampler_ratio,
    )
    if scored.dropped:
        return without_rows(batch, scored.dropped, world)

    return batch


def without_rows(batch: Batch, dropped: Sequence[bool], world: Processes = ALONE) -> Batch:
    """Takes completions (numbered over all processes) out of every term of the loss.

    Only the loss mask changes: the model still reads what it read when the batch was scored.
    """
    kept = [not out for out in world.own(dropped, len(batch.loss_mask))]
    mask = batch.loss_mask * batch.loss_mask.new_tensor(kept)[:, None]

    return replace(batch, loss_mask=mask, num_tokens=world.gather(mask.sum()).sum())


@dataclass(frozen=True, kw_only=True)
class Correction:
    """How the difference between the old policy and the program that sampled is corrected."""

    mode: str  # token_truncate, token_mask, sequence_truncate or sequence_mask
    low: float | None
    high: float | None


def correct_sampler(
    old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, how: Correction
) -> Tensor:
    """Ratios of the old policy to the sampler: [B, T], or [B, 1] of whole sequences.

    Ratios beyond the bounds are moved to them (truncate) or become 0 (mask).
    """
    level, _, action = how.mode.partition("_")

    # Tokens whose log-probability the sampler did not give get the ratio 1.
    difference = ((old_logprobs - sampler_logprobs) * mask).nan_to_num(nan=0.0)
    if level == "sequence":
        difference = difference.sum(dim=-1, keepdim=True)

    ratio = difference.exp()
    if action == "truncate":
        return ratio.clamp(min=how.low, max=how.high)

    low = -torch.inf if how.low is None else how.low
    high = torch.inf if how.high is None else how.high
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


def corrected_in_loss(old: Tensor, batch: Batch, how: Correction | None) -> Tensor | None:
    """The ratio of the policy that the loss compares with to the sampler, if it was not computed
    with the rollout."""
    if batch.sampler_ratio is not None or batch.sampler_logprobs is None or how is None:
        return batch.sampler_ratio

    return correct_sampler(old, batch.sampler_logprobs, batch.completion_mask, how)


# 5. The loss


@dataclass(frozen=True)
class Passed:
    """What a forward pass says about sampled tokens."""

    logprobs: Tensor  # [B, T]
    entropies: Tensor | None = None  # [B, T] in nats
    router_loss: Tensor | None = None  # [], of a mixture of experts


def score_tokens(model: Any, sequences: Sequences, temperature: float = 1.0) -> Passed:
    """One plain forward pass of a Transformers model; the trainer has faster ones."""
    logits = model(input_ids=sequences.ids, attention_mask=sequences.mask).logits
    logits = logits[:, -sequences.length - 1 : -1] / temperature
    table = logits.log_softmax(dim=-1)  # [B, T, vocabulary]

    logprobs = table.gather(2, sequences.completion_ids[..., None]).squeeze(2)
    return Passed(logprobs, -(table.exp() * table).sum(dim=-1))


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """What the loss depends on beside the batch."""

    objective: Objective
    level: str = "token"  # of importance ratios; or "sequence"
    options: Mapping[str, float] = field(default_factory=dict)  # arguments of the objective's loss
    epsilon: float = 0.2  # lower clip width
    epsilon_high: float = 0.2  # upper clip width
    delta: float | None = None  # largest ratio of any token (two-sided clipping)
    cov_share: float = 0.0  # of the tokens that Clip-Cov and KL-Cov change
    beta: float = 0.0  # weight of the KL term
    bias_corrected_kl: bool = False  # weigh the KL of each token by its ratio
    entropy_coef: float | None = None  # weight of the entropy bonus; None for a loss without one
    high_entropy_share: float = 1.0  # train only on this share of tokens, those of high entropy
    off_policy_threshold: float | None = None  # leave out bad completions that are far off policy
    correction: Correction | None = None  # of the sampler, where the batch brings no ratio
    router_coef: float = 0.0
    max_length: int = 1  # of a completion
    micro_batches: int = 1  # of an update
    rollout_batches: int = 1  # micro-batches of the whole rollout


@dataclass(frozen=True, kw_only=True)
class LossOutput:
    """A scalar loss, and metrics over all processes."""

    loss: Tensor
    metrics: Metrics
    entropy_sums: Tensor  # [2]: the sum of this process's entropies, and how many


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """What an objective sees: the pass and the batch, token by token, and the common means."""

    logprobs: Tensor  # [B, T], of the sampled tokens by the policy, with gradient
    old_logprobs: Tensor  # [B, T], by the policy that sampled the batch
    advantages: Tensor  # [B]
    mask: Tensor  # [B, T], 1 on tokens that train; rows may be all 0
    ratio: Tensor  # [B, T] or, of whole sequences, [B, 1]: new to old policy
    settings: LossSettings
    num_tokens: Tensor  # [], of this process that train in one update
    kl: Tensor | None = None  # [B, T], weighted
    on_policy: Tensor | None = None  # [B, 1], 0 for completions that are left out
    high_entropy: Tensor | None = None  # [B, T], tokens with a gradient
    sampler_ratio: Tensor | None = None  # [B, T] or [B, 1]
    world: Processes = ALONE

    @property
    def A(self) -> Tensor:
        """Advantages [B, 1]."""
        return self.advantages[:, None]

    def bounded_ratio(self) -> Tensor:
        delta = self.settings.delta
        if delta is None:
            return self.ratio

        return self.ratio.clamp(max=delta)

    def clipped(self) -> Tensor:
        """The loss of each token: the smaller of plain and clipped ratio, times the advantage."""
        low = 1 - self.settings.epsilon
        high = 1 + self.settings.epsilon_high

        clipped = self.ratio.clamp(low, high) * self.A
        return -torch.min(self.bounded_ratio() * self.A, clipped)

    def weigh(self, values: Tensor) -> Tensor:
        """Token losses without what does not train, corrected for the sampler."""
        for weight in (self.on_policy, self.high_entropy, self.sampler_ratio):
            if weight is not None:
                values = values * weight

        return values

    def mean_over_sequences(self, values: Tensor) -> Mean:
        """The mean over tokens, then over sequences."""
        sums = (self._with_kl(values) * self.mask).sum(-1)
        mean = (sums / self.mask.sum(-1).clamp(min=1.0)).mean()

        return self._of_micro_batch(mean)

    def mean_over_micro_batch(self, values: Tensor) -> Mean:
        """The mean over the tokens of this micro-batch."""
        total = (self._with_kl(values) * self.mask).sum()
        return self._of_micro_batch(total / self.mask.sum().clamp(min=1.0))

    def mean_over_update(self, values: Tensor) -> Mean:
        """The mean over all tokens of the update, over processes and micro-batches."""
        mean = (self._with_kl(values) * self.mask).sum() / self.num_tokens
        return Mean(mean, mean)

    def sum_over_length(self, values: Tensor) -> Mean:
        """The sum over tokens, divided by the longest completion that is allowed."""
        values = self._with_kl(values)
        total = (values * self.mask).sum()
        return self._of_micro_batch(total / (len(values) * self.settings.max_length))

    def sum_over_sequences(self, values: Tensor) -> Mean:
        """The sum over the tokens of a sequence, then the mean over sequences."""
        return self._of_micro_batch((self._with_kl(values) * self.mask).sum(-1).mean())

    def mean_of_sequences(self, values: Tensor) -> Mean:
        """The mean of values [B], and apart from it that of the KL term."""
        mean = values.mean()
        if self.kl is None:
            return self._of_micro_batch(mean)

        sums = (self.kl * self.mask).sum(-1)
        kl = (sums / self.mask.sum(-1).clamp(min=1.0)).mean()
        return self._of_micro_batch(mean + kl)

    def _with_kl(self, values: Tensor) -> Tensor:
        if self.kl is None:
            return values

        return values + self.kl

    def _of_micro_batch(self, mean: Tensor) -> Mean:
        return Mean(mean, mean / self.settings.micro_batches)

    def masked_mean(self, values: Tensor) -> float:
        return masked_mean(values, self.mask, self.world)

    def clip_metrics(self, low: Tensor | None = None, high: Tensor | None = None) -> Metrics:
        """clip_ratio/*: how many tokens the clip leaves without a gradient, on either side."""
        if low is None or high is None:
            ratio = self.bounded_ratio()
            low = (ratio < 1 - self.settings.epsilon) & (self.A < 0)
            high = (ratio > 1 + self.settings.epsilon_high) & (self.A > 0)

        lows = self.world.gather(self._share_of_each(low.float()))
        highs = self.world.gather(self._share_of_each(high.float()))

        return {
            "clip_ratio/low_mean": self.masked_mean(low.float()),
            "clip_ratio/high_mean": self.masked_mean(high.float()),
            "clip_ratio/region_mean": self.masked_mean((low | high).float()),
            "clip_ratio/low_min": lows.nan_to_num(nan=torch.inf).min().item(),
            "clip_ratio/high_max": highs.nan_to_num(nan=-torch.inf).max().item(),
        }

    def _share_of_each(self, values: Tensor) -> Tensor:
        """[B], NaN for a sequence without a token that trains."""
        if values.shape[1] == 1:
            return values.squeeze(1)
        return (values * self.mask).sum(-1) / self.mask.sum(-1)


def compute_loss(
    passed: Passed, batch: Batch, settings: LossSettings, world: Processes = ALONE
) -> LossOutput:
    """The objective with its KL term, the entropy bonus, and the loss of the router."""
    inputs, kl_metric = loss_inputs(passed, batch, settings, world)
    policy = settings.objective.loss(inputs, **settings.options)
    loss = policy.mean.share
    metrics: Metrics = {}

    entropies = passed.entropies
    assert entropies is not None

    if inputs.high_entropy is None:
        explored = inputs.mask
    else:
        explored = inputs.mask * inputs.high_entropy

    if settings.entropy_coef is not None:
        bonus = (entropies * explored).sum() / explored.sum().clamp(min=1.0)
        loss = loss - settings.entropy_coef * (bonus / settings.micro_batches)
        metrics["policy_loss"] = world.gather(policy.mean.value.detach()).nanmean().item()

    if passed.router_loss is not None:
        loss = loss + settings.router_coef * passed.router_loss / settings.micro_batches
        metrics["aux_loss"] = world.gather(passed.router_loss.detach()).mean().item()

    metrics |= kl_metric
    metrics["entropy"] = inputs.masked_mean(entropies)
    metrics |= policy.metrics

    log_ratio = None
    if batch.old_logprobs is not None:
        log_ratio = passed.logprobs.detach() - batch.old_logprobs

    distribution = policy_metrics(entropies.detach(), log_ratio, inputs.mask, world.gather)
    if not distribution:  # no token trains, so there is nothing to average
        metrics = {name: without_tokens(name, value) for name, value in metrics.items()}

    return LossOutput(
        loss=loss,
        metrics=metrics | distribution,
        entropy_sums=torch.stack([(entropies * explored).sum(), explored.sum()]).detach(),
    )


def loss_inputs(
    passed: Passed, batch: Batch, settings: LossSettings, world: Processes = ALONE
) -> tuple[LossInputs, Metrics]:
    """What the objective sees, and the metric of the KL term."""
    logprobs = passed.logprobs
    mask = batch.loss_mask

    if batch.old_logprobs is None:
        old = logprobs.detach()
    else:
        old = batch.old_logprobs

    ratio = importance_ratio(logprobs - old, mask, settings.level)

    kl = None
    metrics: Metrics = {}
    if settings.beta:
        assert batch.reference_logprobs is not None
        kl = kl_term(logprobs, batch.reference_logprobs)
        kl = kl * ratio if settings.bias_corrected_kl else kl
        metrics["kl"] = masked_mean(kl, mask, world)

    high_entropy = None
    if settings.high_entropy_share < 1:
        assert passed.entropies is not None
        share = settings.high_entropy_share
        high_entropy = high_entropy_tokens(passed.entropies, mask, share, world)

    on_policy = None
    if settings.off_policy_threshold is not None:
        if batch.sampler_logprobs is None:
            sampler = old
        else:
            sampler = batch.sampler_logprobs

        drift = sampler - logprobs.detach()
        on_policy = on_policy_rows(drift, batch.advantages, mask, settings.off_policy_threshold)

    sampler_ratio = corrected_in_loss(old, batch, settings.correction)
    if sampler_ratio is not batch.sampler_ratio:
        assert sampler_ratio is not None
        metrics |= sampler_metrics(batch, sampler_ratio, old, world)

    share = batch.num_tokens.clamp(min=1.0) / world.size
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=old,
        advantages=batch.advantages,
        mask=mask,
        ratio=ratio,
        settings=settings,
        num_tokens=share * settings.micro_batches / settings.rollout_batches,
        kl=None if kl is None else settings.beta * kl,
        on_policy=on_policy,
        high_entropy=high_entropy,
        sampler_ratio=sampler_ratio,
        world=world,
    )
    return inputs, metrics


def importance_ratio(log_ratio: Tensor, mask: Tensor, level: str) -> Tensor:
    """Of each token [B, T], or the geometric mean over each sequence [B, 1]."""
    if level == "sequence":
        log_ratio = ((log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0))[:, None]
    return log_ratio.exp()


def kl_term(logprobs: Tensor, reference: Tensor) -> Tensor:
    """An unbiased estimate of KL(policy, reference) that is never negative, [B, T]."""
    return torch.exp(reference - logprobs) - (reference - logprobs) - 1


def high_entropy_tokens(entropies: Tensor, mask: Tensor, share: float, world: Processes) -> Tensor:
    """The share of all tokens with the largest entropy, [B, T]."""
    everyone = world.gather_ragged(entropies[mask.bool()].float())
    if not everyone.numel():
        return torch.zeros_like(entropies, dtype=torch.bool)

    threshold = torch.quantile(everyone, 1 - share)
    return (entropies * mask.float() >= threshold) & mask.bool()


def on_policy_rows(drift: Tensor, advantages: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """[B, 1], 0 for completions with a negative advantage that are far off policy.

    `drift` [B, T] is the sampler's log-probability minus the policy's (DeepSeek-V3.2's mask).
    """
    # Tokens that the sampler did not score (NaN) are no evidence.
    total = (drift.nan_to_num(nan=0.0) * mask).sum(dim=1, keepdim=True)
    mean = total / mask.sum(dim=1, keepdim=True).clamp(min=1.0)

    kept = (advantages[:, None] >= 0) | (mean <= threshold)
    return kept.to(mask.dtype)


# 6. Metrics


def rollout_metrics(
    rollout: Rollout, device: Any, world: Processes = ALONE, with_tools: bool = False
) -> Metrics:
    """completions/repetition, and of episodes with tools how long they were."""
    own = repetition(rollout.completion_tokens)["completions/repetition"]
    mean = world.gather(torch.tensor([own], device=device)).mean().item()
    metrics = {"completions/repetition": mean}
    if not with_tools:
        return metrics

    rows = []
    for messages in rollout.completions:
        turns = sum(message.get("role") == "assistant" for message in messages)
        rows.append([float(turns), float(is_unfinished(messages))])

    turns, unfinished = world.gather(torch.tensor(rows, device=device)).mean(dim=0).tolist()
    return metrics | {"tools/turns": turns, "tools/unfinished": unfinished}


def reward_metrics(scored: Scored, advantages: Advantages, names: Sequence[str]) -> Metrics:
    """TRL's metrics of the rewards; `names` are of the reward functions."""
    assert scored.by_function is not None
    metrics: Metrics = {}
    for name, column in zip(names, scored.by_function.T, strict=True):
        metrics[f"rewards/{name}/mean"] = column.nanmean().item()
        metrics[f"rewards/{name}/std"] = nan_std(column).item()

    totals = scored.rewards.flatten()
    is_zero = torch.isclose(advantages.spread, torch.zeros_like(advantages.spread))

    return metrics | {
        "reward": totals.nanmean().item(),
        "reward_std": nan_std(totals).item(),
        "frac_reward_zero_std": is_zero.float().mean().item(),
    }


def sampler_metrics(
    batch: Batch, ratio: Tensor, old_logprobs: Tensor, world: Processes = ALONE
) -> Metrics:
    """TRL's metrics of how far the program that sampled is from the old policy."""
    assert batch.sampler_logprobs is not None
    trains = batch.loss_mask.bool()

    gap = (old_logprobs - batch.sampler_logprobs).abs()
    gap = gap[trains & ~gap.isnan()]
    ratio = ratio.flatten() if ratio.shape[1] == 1 else ratio[trains]

    nothing = gap.new_zeros(1)
    gap = gap if gap.numel() else nothing
    ratio = ratio if ratio.numel() else nothing
    name = "sampling/importance_sampling_ratio"

    return {
        "sampling/sampling_logp_difference/mean": world.gather(gap.mean()).mean().item(),
        "sampling/sampling_logp_difference/max": world.gather(gap.max()).max().item(),
        f"{name}/min": world.gather(ratio.min()).min().item(),
        f"{name}/mean": world.gather(ratio.mean()).nanmean().item(),
        f"{name}/max": world.gather(ratio.max()).max().item(),
    }


def masked_metrics(batch: Batch, world: Processes = ALONE) -> Metrics:
    """sampling/masked: the share of tokens that the correction of the sampler masks."""
    ratio = batch.sampler_ratio
    if ratio is None:
        return {}

    sizes = batch.completion_mask[:, : ratio.shape[1]].sum(dim=1).clamp(min=1)
    shares = (ratio == 0).sum(dim=1) / sizes  # the ratio is 1 on padding

    return {"sampling/masked": world.gather(shares).mean().item()}


def masked_mean(values: Tensor, mask: Tensor, world: Processes = ALONE) -> float:
    """The mean over the tokens that train, or over sequences for [B, 1], of all processes."""
    if values.shape[1] == 1:
        sums = torch.stack([values.sum(), values.new_tensor(float(len(values)))])
    else:
        sums = torch.stack([(values * mask).sum(), mask.sum().float()])

    total, count = world.gather(sums.detach()[None]).sum(dim=0)
    return (total / count.clamp(min=1.0)).item()


def without_tokens(name: str, value: float) -> float:
    """NaN, which is left out of averages, for what is a mean over the tokens that train."""
    if name in ("entropy", "kl") or "clip_ratio" in name:
        return torch.nan

    return value


def policy_metrics(
    entropies: Tensor,
    log_ratio: Tensor | None,
    mask: Tensor,
    gather: Callable[[Tensor], Tensor] = identity,
) -> Metrics:
    """entropy/trajectory_q1 to _q3, ratio/log_min and ratio/log_max; empty if no token trains.

    All [B, T]; `log_ratio` of the new to the old policy is None where they are the same.
    """
    trains = mask != 0
    H = trajectory_entropy(entropies, mask)

    low = high = torch.zeros_like(H)
    if log_ratio is not None:
        low = torch.where(trains, log_ratio.float(), torch.inf).amin(dim=1)
        high = torch.where(trains, log_ratio.float(), -torch.inf).amax(dim=1)

    rows = torch.stack([H, low, high], dim=1)
    rows = gather(torch.where(trains.any(dim=1, keepdim=True), rows, torch.nan))
    rows = rows[~rows[:, 0].isnan()]
    if not len(rows):
        return {}

    H, low, high = rows.unbind(dim=1)
    quartiles = torch.quantile(H, torch.tensor([0.25, 0.5, 0.75], device=H.device))
    values = torch.cat([quartiles, low.min()[None], high.max()[None]]).tolist()
    names = [f"entropy/trajectory_q{k}" for k in (1, 2, 3)] + ["ratio/log_min", "ratio/log_max"]

    return dict(zip(names, values, strict=True))


# The whole step


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """The parts of a step, for one that runs without a trainer."""

    sample: Callable[[Sequence[Row]], Rollout]
    policy: Callable[[Sequences], Passed]
    scoring: Scoring
    loss: LossSettings
    scaling: Scaling = Scaling()
    padding: Padding = Padding()


def training_loss(rows: Sequence[Row], parts: StepParts) -> LossOutput:
    """One step: its loss has a gradient for the policy's weights."""
    rollout = parts.sample(rows)
    sequences = pad(rollout, parts.padding)

    scored = score(rollout, rows, parts.scoring)
    advantages = compute_advantages(scored, parts.scaling)
    batch = make_batch(sequences, scored, advantages)

    return compute_loss(parts.policy(batch), batch, parts.loss)
