"""Plays episodes of environments: many at once, and the model writes for all that wait.

    episodes = one coroutine per row, which asks `reply` for each of the model's messages
    settle   = let them run until each waits for the model, or has ended
    write    = one batch of completions for those that wait; again

The order of a batch is that of the rows, so the same random numbers give the same episodes. An
episode that raises, hangs or replies too much has no reward; the others go on.
"""

import asyncio
import itertools
import json
import math
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from mesotron.config.train import environment_label
from mesotron.runs.own_code import calling, text_of, warn_once
from mesotron.sampling.decode import Completion, generate_ids
from mesotron.sampling.tools import ChatText
from mesotron.tasks.environment import KEY, ChatMessage, Played, open_environment
from mesotron.tasks.prompts import plain_text

SECONDS = 60.0  # for the replies of a round
BLOCKED = 20.0  # for code that lets no other episode run
CANCELED = 5.0  # for an episode to end when it is told to
MAX_LOST = 3  # batches in a row without an episode, after which a run stops
CHARACTERS = 100_000  # of what an environment replies at once

TokenLists = Sequence[Sequence[int]]
Written = tuple[Sequence[list[int]], Sequence[list[float]] | None]  # tokens, log-probabilities
Write = Callable[[TokenLists, int], Written]  # of contexts, and of the most tokens that are left


@dataclass(frozen=True)
class TurnText:
    """Messages as tokens that go on where the model stopped."""

    chat: ChatText
    system: str = ""

    @classmethod
    def of(cls, tokenizer: Any, system: str | None) -> "TurnText":
        can_call = getattr(tokenizer, "response_template", None) is not None
        chat = ChatText.of(tokenizer) if can_call else ChatText(tokenizer, None)
        return cls(chat, system or "")

    @property
    def tokenizer(self) -> Any:
        return self.chat.tokenizer

    def opening(self, messages: Sequence[ChatMessage], tools: Sequence[Any]) -> list[ChatMessage]:
        """The first messages, with the run's system prompt if they have none."""
        if tools and getattr(self.tokenizer, "response_template", None) is None:
            raise ValueError("the model has no tool calls in its chat template")
        if not self.system or messages[0]["role"] == "system":
            return list(messages)

        return [{"role": "system", "content": self.system}, *messages]

    def first(self, messages: Sequence[ChatMessage], tools: Sequence[Any]) -> list[int]:
        if self.tokenizer.chat_template is None:
            return self.chat.encode(plain_text(messages))

        return self.chat.encode(self.chat.render(messages, tools))

    def following(self, messages: Sequence[ChatMessage], tools: Sequence[Any]) -> list[int]:
        """Tokens between the end of the model's message and its next one."""
        if self.tokenizer.chat_template is None:
            return self.chat.encode(f"\n\n{plain_text(messages)}")

        before = [{"role": "user", "content": "dummy"}, dummy_message(messages[0])]
        start = self.chat.encode(self.chat.render(before, tools, prompts=False))
        whole = self.chat.encode(self.chat.render([*before, *messages], tools))

        # Templates may add a line break after the end token, which the model did not write.
        end = self.tokenizer.eos_token_id
        if end in start:
            start = start[: len(start) - start[::-1].index(end)]

        return whole[len(start) :]

    def read(self, ids: list[int], context: Sequence[int], tools: Sequence[Any]) -> ChatMessage:
        """The model's message, with its calls."""
        end = self.tokenizer.eos_token_id
        body = ids[:-1] if ids and ids[-1] == end else ids
        text = self.tokenizer.decode(body, skip_special_tokens=True)
        if not tools:
            return {"role": "assistant", "content": text}

        completion = Completion(text, tuple(body), truncated=len(body) == len(ids))
        return self.chat.read(completion, list(context), list(tools))


def dummy_message(following: ChatMessage) -> ChatMessage:
    """A message that another of this role can follow."""
    message: ChatMessage = {"role": "assistant", "content": ""}
    if following["role"] == "tool":
        function = {"name": following.get("name", "tool"), "arguments": {}}
        message["tool_calls"] = [{"type": "function", "function": function}]

    return message


@dataclass
class TurnEpisode:
    """One episode; what has been said in it grows with every turn."""

    name: str  # of its environment
    start: Any
    text: TurnText
    max_tokens: int
    messages: list[ChatMessage] = field(default_factory=list)
    opening: int = 0  # messages before the model's first
    unread: list[ChatMessage] = field(default_factory=list)  # that the model has not answered
    tools: Sequence[Any] = ()
    prompt_ids: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)  # all that followed the prompt
    written: list[int] = field(default_factory=list)  # 1 for each of them that the model wrote
    logprobs: list[float] = field(default_factory=list)
    suffix: list[int] = field(default_factory=list)  # of the messages that are not answered
    played: Played | None = None
    error: str = ""  # why it was not played to its end
    question: asyncio.Future[ChatMessage | None] | None = None
    quiet: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    # What the environment sees

    async def reply(self, *messages: ChatMessage, tools: Sequence[Any] = ()) -> ChatMessage | None:
        characters = sum(map(num_characters, messages))
        if not messages or characters > CHARACTERS:
            raise ValueError(f"it replied {characters:,} characters, of 1 to {CHARACTERS:,}")

        self.unread = list(messages)
        if not self.prompt_ids:
            self.tools = tools
            self.unread = self.text.opening(messages, tools)
            self.prompt_ids = self.text.first(self.unread, tools)
        else:
            self.suffix = self.text.following(messages, self.tools)

        if self.left <= 0:
            return None

        self.question = asyncio.get_running_loop().create_future()
        self.quiet.set()
        return await self.question

    # What the sampler sees

    @property
    def left(self) -> int:
        """Tokens that the model may still write."""
        is_cut = bool(self.ids) and self.ids[-1] != self.text.tokenizer.eos_token_id
        return 0 if is_cut else self.max_tokens - len(self.ids) - len(self.suffix)

    @property
    def waits(self) -> bool:
        return self.question is not None and not self.error and not self.is_over

    @property
    def is_over(self) -> bool:
        return self.task is not None and self.task.done()

    @property
    def context(self) -> list[int]:
        return [*self.prompt_ids, *self.ids, *self.suffix]

    def take(self, ids: list[int], logprobs: Sequence[float] | None) -> None:
        """The model's turn; the environment goes on."""
        assert self.question is not None
        context = self.context
        ids = ids[: self.left]
        nothing = [math.nan] * len(self.suffix)
        self.ids += [*self.suffix, *ids]
        self.written += [*(0 for _ in self.suffix), *(1 for _ in ids)]
        self.logprobs += [*nothing, *(logprobs or [math.nan] * len(ids))[: len(ids)]]

        message = self.text.read(ids, context, self.tools)
        self.opening = self.opening or len(self.unread)
        self.messages += [*self.unread, message]
        self.unread = []
        self.suffix = []

        self.quiet.clear()
        question, self.question = self.question, None
        question.set_result(message)

    def fill(self) -> None:
        """An empty completion, which does not train, where the model was never asked."""
        if self.ids:
            return

        end = self.text.tokenizer.eos_token_id
        self.messages = [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]
        self.opening = 1
        self.prompt_ids = self.prompt_ids or [end]
        self.ids = [end]
        self.written = [0]
        self.logprobs = [math.nan]

    @property
    def turns(self) -> int:
        messages = self.messages[self.opening :]
        return any(self.written) * sum(one["role"] == "assistant" for one in messages)

    def completion(self) -> Completion:
        end = self.text.tokenizer.eos_token_id
        is_cut = not self.ids or self.ids[-1] != end
        body = self.ids if is_cut else self.ids[:-1]
        text = str(self.messages[-1].get("content") or "") if self.messages else ""
        return Completion(text, tuple(body), is_cut, played=self.played)


class TurnSampler:
    """Plays the episodes of a run's environments.

    Args:
        names: of the environments, such as vf:sums.
        tokenizer: of the model.
        system: the run's system prompt, for environments without one.
    """

    def __init__(self, names: Sequence[str], tokenizer: Any, system: str | None = None) -> None:
        self.names = names
        self.text = TurnText.of(tokenizer, system)
        self.loop = asyncio.new_event_loop()
        self.ends: list[tuple[asyncio.Event, asyncio.Task[None]]] = []
        self.blocked = 0  # times that an episode kept the others waiting
        self.lost = MAX_LOST - 1  # batches in a row without an episode

    def open(self) -> None:
        """Start what the environments share."""
        for name in self.names:
            self._run(self._hold(name))

    def close(self) -> None:
        if self.loop.is_closed():
            return

        for end, keeper in reversed(self.ends):
            end.set()
            self._run(asyncio.wait({keeper}, timeout=CANCELED))

        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    async def _hold(self, name: str) -> None:
        """Enter an environment's `serving` in a task of its own, which also leaves it."""
        ready = asyncio.Event()
        end = asyncio.Event()

        async def keep() -> None:
            async with open_environment(name).serving():
                ready.set()
                await end.wait()

        keeper = asyncio.create_task(keep())
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait({keeper, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if keeper.done():
            waiting.cancel()
            error = keeper.exception()
            raise ValueError(f"--env {name} does not start: {error}") from error

        self.ends.append((end, keeper))

    def sample(
        self, rows: Sequence[Mapping[str, Any]], write: Write, max_tokens: int
    ) -> list[TurnEpisode]:
        """Play one episode for each row, which all end here; in the order of the rows.

        Args:
            write: completes contexts.
            max_tokens: of each episode, replies included.
        """
        if not self.ends:
            self.open()

        episodes = [self._episode(row, max_tokens) for row in rows]
        try:
            self._run(self._start(episodes))
            while waiting := [one for one in episodes if one.waits]:
                left = max(one.left for one in waiting)
                tokens, logprobs = write([one.context for one in waiting], left)
                for k, one in enumerate(waiting):
                    one.take(list(tokens[k]), None if logprobs is None else logprobs[k])

                self._run(self._settle(episodes))
        finally:
            self._run(cancel(one for one in episodes if not one.is_over))

        for one in episodes:
            one.fill()

        self._refuse_none(episodes)
        return episodes

    def play(
        self,
        model: Any,
        tokenizer: Any,
        chats: Sequence[Any],
        rows: Sequence[Mapping[str, Any]],
        *,
        max_tokens: int,
        seed: int = 0,
        **how: Any,
    ) -> list[Completion]:
        """One completion per row for an evaluation: the text of its last message, the tokens of
        all turns."""
        seeds = itertools.count(seed)
        limit = model.config.get_text_config().max_position_embeddings
        end = tokenizer.eos_token_id

        def write(contexts: TokenLists, left: int) -> Written:
            most = max(1, min(left, limit - max(map(len, contexts))))
            done = generate_ids(
                model, tokenizer, contexts, max_tokens=most, seed=next(seeds), **how
            )
            return [[*one.ids, *(() if one.truncated else (end,))] for one in done], None

        return [episode.completion() for episode in self.sample(rows, write, max_tokens)]

    def _refuse_none(self, episodes: Sequence[TurnEpisode]) -> None:
        """Stop a run none of whose episodes can be played: at the start, or for some batches."""
        if any(one.played is not None for one in episodes):
            self.lost = 0
            return

        self.lost += 1
        if episodes and self.lost >= MAX_LOST:
            one = episodes[-1]
            raise ValueError(
                f"none of {len(episodes)} episodes could be played; the last, of {one.name}: "
                f"{one.error}"
            )

    def _episode(self, row: Mapping[str, Any], max_tokens: int) -> TurnEpisode:
        columns = row["columns"]
        if isinstance(columns, str):
            columns = json.loads(columns)

        name, start = columns[KEY]
        return TurnEpisode(name, start, self.text, max_tokens)

    async def _start(self, episodes: Sequence[TurnEpisode]) -> None:
        for one in episodes:
            one.task = asyncio.create_task(play_one(one))

        await self._settle(episodes)

    async def _settle(self, episodes: Sequence[TurnEpisode]) -> None:
        """Wait until each episode waits for the model or has ended; end those that take longer."""
        busy = []
        for one in episodes:
            if not (one.waits or one.is_over or one.error):  # one that ignores its end is left
                busy.append(one)

        if not busy:
            return

        late = {asyncio.create_task(one.quiet.wait()) for one in busy}
        blocked = -1
        while late and blocked < self.blocked:  # the time that others kept does not count
            blocked = self.blocked
            _, late = await asyncio.wait(late, timeout=SECONDS)

        for event in late:
            event.cancel()

        slow = [one for one in busy if not one.quiet.is_set()]
        for one in slow:
            one.error = f"it took more than {SECONDS:g} s"

        await cancel(slow)

    def _run(self, work: Any) -> Any:
        with calling("an environment"), unblocked(self.loop, BLOCKED, self._note_blocked):
            return self.loop.run_until_complete(work)

    def _note_blocked(self) -> None:
        self.blocked += 1


async def play_one(one: TurnEpisode) -> None:
    """An episode from its start to its end."""
    try:
        played = await open_environment(one.name).play(one.start, one)
        numbers = [played.reward, *played.parts.values(), *played.metrics.values()]
        if not all(map(math.isfinite, numbers)):
            raise ValueError("it gave a number that is not finite")

        if not one.error:  # it was not ended before
            one.played = played
    except (Exception, SystemExit) as error:
        one.error = one.error or text_of(error) or type(error).__name__
        warn_once(f"{one.name}: an episode is left out: {one.error}")
    finally:
        one.quiet.set()


async def cancel(episodes: Any) -> None:
    """End episodes, whatever they wait for; what ignores that is left behind."""
    tasks = {one.task for one in episodes if one.task is not None}
    for task in tasks:
        task.cancel()

    if tasks:
        await asyncio.wait(tasks, timeout=CANCELED)


@contextmanager
def unblocked(
    loop: asyncio.AbstractEventLoop, seconds: float, note: Callable[[], None]
) -> Iterator[None]:
    """Raise TimeoutError in code that keeps a loop from turning for so long: in the episode that
    runs it, after a `note`. Outside the main thread, which no signal reaches, there is no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        note()
        raise TimeoutError(f"it let nothing else run for {seconds:g} s")

    def beat() -> None:
        nonlocal timer
        signal.setitimer(signal.ITIMER_REAL, seconds, seconds)  # again for the next that blocks
        timer = loop.call_later(seconds / 4, beat)

    before = signal.signal(signal.SIGALRM, stop)
    timer = loop.call_soon(beat)
    try:
        yield
    finally:
        timer.cancel()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def num_characters(message: ChatMessage) -> int:
    return len(str(message.get("content") or ""))


def episode_metrics(episodes: Sequence[TurnEpisode]) -> dict[str, float]:
    """environment/NAME/*: what the episodes of each environment earned, and how many were lost."""
    by_name: dict[str, list[TurnEpisode]] = {}
    for one in episodes:
        by_name.setdefault(one.name, []).append(one)

    metrics: dict[str, float] = {}
    for name, own in by_name.items():
        stem = f"environment/{environment_label(name)}"
        metrics[f"{stem}/lost"] = fmean(one.played is None for one in own)
        metrics[f"{stem}/turns"] = fmean(one.turns for one in own)

        values: dict[str, list[float]] = {}
        for one in own:
            for key, value in earned(one).items():
                values.setdefault(f"{stem}/{key}", []).append(value)

        metrics |= {key: fmean(each) for key, each in values.items()}

    return metrics


def earned(one: TurnEpisode) -> dict[str, float]:
    """What an episode earned, by the rest of its metrics' names."""
    if one.played is None:
        return {}

    values = {"reward": one.played.reward}
    values |= {f"part/{name}": value for name, value in one.played.parts.items()}
    values |= {f"metric/{name}": value for name, value in one.played.metrics.items()}

    return values
