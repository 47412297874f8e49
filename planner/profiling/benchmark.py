"""The self-benchmark: prompts one by one, then streams side by side, on an idle instance."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from planner.core.perf.profile import DecodePoint, PrefillPoint, Profile
from planner.profiling.grid import OUTPUT_TOKENS, Grid, GridOptions, grid_of
from planner.profiling.instance import BenchmarkError, EngineState, Instance, Model, Target
from replayer.arguments import InputError
from replayer.replay.client import TimedExchange, open_session

WARM_UP_TOKENS = 2048
"""Of the first two prompts. An engine's first one compiles; the second one tells its speed."""
NEW_SEEDS = 1 << 31


@dataclass(frozen=True, slots=True)
class BenchmarkOptions:
    """What to measure, how finely, and on how many GPUs it runs."""

    target: Target
    grid: GridOptions = field(default_factory=GridOptions)
    gpus: int = 1


async def benchmark(
    options: BenchmarkOptions, say: Callable[[str], None], clock: Callable[[], float]
) -> Profile:
    """Measure an instance, telling what is done; nothing that was sent outlives the call.

    Raises InputError for an instance that cannot be measured, and BenchmarkError once it is.
    """
    async with open_session() as session:
        instance = Instance(session, options.target, clock, secrets.randbelow(NEW_SEEDS))
        model, state = await instance.serves(), await instance.state()
        url = options.target.url
        if not state.is_idle:
            load = f"{state.running} running and {state.waiting} waiting requests"
            raise InputError(f"--instance {url}: is not idle: it has {load}; drain it first")
        if not state.kv_tokens:
            raise InputError(f"--instance {url}: its metrics do not tell the size of its KV cache")
        run = _Run(instance, options, model, state.kv_tokens, say)
        return await run.measure()


class _Run:
    """One run: what it measures, and the number of the next prompt that nothing has cached."""

    def __init__(
        self,
        instance: Instance,
        options: BenchmarkOptions,
        model: Model,
        kv_tokens: int,
        say: Callable[[str], None],
    ) -> None:
        self._instance, self._options, self._model = instance, options, model
        self._kv_tokens, self._say = kv_tokens, say
        self._grid = grid_of(options.grid, model.max_model_len, kv_tokens)
        self._fresh = options.grid.max_num_seqs

    async def measure(self) -> Profile:
        """Say how long it takes, and measure all points."""
        tokens = min(WARM_UP_TOKENS, self._grid.prompts[-1])
        await self._alone(tokens, OUTPUT_TOKENS)
        warm = await self._alone(tokens, OUTPUT_TOKENS)
        self._say(self._plan(self._grid.expected_s(tokens / _ttft_s(warm), _step_s(warm))))
        prefill = [await self._prefill(tokens) for tokens in self._grid.prompts]
        decode = [await self._decode(context, batch) for context, batch in self._grid.streams]
        return Profile(tuple(prefill), tuple(decode), self._kv_tokens)

    def _plan(self, expected_s: float) -> str:
        grid: Grid = self._grid
        largest = max(batch for _, batch in grid.streams)
        return (
            f"{self._model.name} at {self._options.target.url}: {len(grid.prompts)} prompts of up "
            f"to {grid.prompts[-1]} tokens, {len(grid.streams)} batches of up to {largest} streams,"
            f" about {expected_s:.0f} s"
        )

    async def _alone(self, tokens: int, output_tokens: int) -> TimedExchange:
        await self._instance.idle()
        self._fresh += 1
        answer = await self._instance.answer(self._fresh, tokens, output_tokens)
        if cached := answer.stream.cached_tokens:
            raise BenchmarkError(f"{cached} of {tokens} tokens were cached, of a prompt never sent")
        return answer

    async def _prefill(self, tokens: int) -> PrefillPoint:
        ttft_s = _ttft_s(await self._alone(tokens, 1))
        self._say(f"{tokens} tokens: first token after {ttft_s * 1e3:.1f} ms")
        return PrefillPoint(tokens, ttft_s, tokens / ttft_s / self._options.gpus)

    async def _decode(self, context: int, batch: int) -> DecodePoint:
        idle = await self._instance.idle()
        found = await self._instance.beside(context, batch, self._model.max_model_len - context)
        _expect(found.before, batch - 1)
        generated = (found.before.generated + found.after.generated) / 2 - idle.generated
        kv_ratio = min(1.0, (batch * context + generated) / self._kv_tokens)
        itl_s = _step_s(found.measured)
        self._say(
            f"{batch} x {context} tokens, {kv_ratio:.1%} of the KV: "
            f"{itl_s * 1e3:.1f} ms between tokens"
        )
        return DecodePoint(kv_ratio, context, itl_s, batch / itl_s / self._options.gpus)


def _expect(state: EngineState, streams: int) -> None:
    """Refuse a measurement beside other requests than those of the batch."""
    if (state.running, state.waiting) != (streams, 0):
        raise BenchmarkError(
            f"{state.running} requests ran and {state.waiting} waited where {streams} were sent: "
            "is somebody else there, or --max-num-seqs larger than the engine's?"
        )


def _ttft_s(answer: TimedExchange) -> float:
    """Time to the first token: the first bytes, since its text may be empty."""
    assert answer.first_byte_s is not None, "a whole answer has bytes"
    return answer.first_byte_s - answer.sent_s


def _step_s(answer: TimedExchange) -> float:
    """Time from one token to the next."""
    assert answer.first_byte_s is not None, "a whole answer has bytes"
    tokens = answer.stream.completion_tokens or 0
    if tokens < 2:
        raise BenchmarkError(f"an answer of {tokens} tokens where {OUTPUT_TOKENS} were asked for")
    return (answer.end_s - answer.first_byte_s) / (tokens - 1)
