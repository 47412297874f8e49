"""Durations of engine steps and KV transfers: the only place with hardware numbers.

Step time `a0 + a1*prefill_tokens + a2*num_decode + a3*kv_tokens + a4*prefill_tokens*context`, the
linear model that fits vLLM's iteration times. `context` of a chunk: mean number of tokens that its
tokens attend to, that is the tokens computed before plus half of the chunk. `kv_tokens`: KV read by
the decoding sequences.

The preset stands for an 8B dense model (32 layers, width 4096, 8 KV heads of 128, bf16) on one
H100 SXM (989 TFLOPS dense bf16, 3.35 TB/s):

- a0 = 8 ms: reading 16 GB of weights takes 4.8 ms at peak; 60 % of peak gives a step of 8 ms.
- a1 = 42 us: set so that a 16k prompt is prefilled at 20,000 tokens/s over all terms (16 GFLOP
  per token at 38 % of peak).
- a2 = 50 us: launch, sampling and output handling per sequence; an assumption.
- a3 = 39 ns: 131,072 bytes of KV per token at 3.35 TB/s.
- a4 = 0.8 ns: 4 * 4096 * 32 = 524,288 FLOP per token pair at 65 % of peak.

Other engines: a step may also take `prefill_s` where it prefills and `token_s` where it yields
tokens, so that a step which does both takes both. `MOCKER` and `A100` are two of them.

Transfer time: `x0 + tokens*bytes_per_token/bandwidth`. 2 (K, V) * 32 * 8 * 128 * 2 bytes = 131,072
bytes per token. 20 GB/s is a 200 Gbit/s link at 80 %. x0 = 30 ms covers the handshake and the
polling of both schedulers. Concurrent transfers do not slow one another.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of one engine step; see the module docstring for formula, units and sources."""

    a0: float = 8e-3
    a1: float = 42e-6
    a2: float = 50e-6
    a3: float = 3.9e-8
    a4: float = 8e-10
    prefill_s: float = 0.0
    token_s: float = 0.0

    def step_s(
        self, prefill_tokens: int, pairs: float, decodes: int, kv_tokens: int, firsts: int = 0
    ) -> float:
        """Duration in seconds; `pairs` is the sum of tokens * context over the chunks.

        `firsts`: prompts that the step completes, each with its first token.
        """
        step_s = (
            self.a0
            + self.a1 * prefill_tokens
            + self.a2 * decodes
            + self.a3 * kv_tokens
            + self.a4 * pairs
        )
        if prefill_tokens:
            step_s += self.prefill_s
        if decodes or firsts:
            step_s += self.token_s
        return step_s


MOCKER = StepCost(a0=0.0, a1=5e-5, a2=0.0, a3=3e-8, a4=0.0, prefill_s=4e-3, token_s=0.01)
"""Dynamo's engine simulator with a linear profile. Prefill takes 4 ms and 20,000 tokens/s whatever
the context. A decode step takes 10 ms, and 3 ms per 100,000 tokens of streams' KV."""
A100 = StepCost(a0=13e-3, a1=84e-6, a2=50e-6, a3=6.4e-8, a4=2.6e-9)
"""The preset's model on an A100 SXM (312 TFLOPS dense bf16, 2.04 TB/s) by the same formulas. a0, a3
and a4 use the same share of the peak, a1 uses 61 % of it, twice the preset's share."""


@dataclass(frozen=True, slots=True)
class TransferCost:
    """Seconds to move KV between two engines: fixed part, bytes per token, bytes per second."""

    x0: float = 0.03
    bytes_per_token: int = 131_072
    bandwidth: float = 20e9

    def transfer_s(self, tokens: int) -> float:
        """Duration in seconds; 0 for an empty pull, which only makes the sender unpin."""
        return self.x0 + tokens * self.bytes_per_token / self.bandwidth if tokens else 0.0


@dataclass(frozen=True, slots=True)
class IntakeCost:
    """Seconds from sending a request to queueing it: HTTP, parsing, tokenisation.

    Zero by default, since behind real sockets they take their own time. `analyze check` fits them.
    """

    fixed_s: float = 0.0
    per_token_s: float = 0.0

    def delay_s(self, prompt_tokens: int) -> float:
        """Duration in seconds for a prompt of this length."""
        return self.fixed_s + self.per_token_s * prompt_tokens


@dataclass(slots=True)
class DecodeRun:
    """Consecutive pure decode steps of the same sequences, in closed form.

    Every step adds one token of KV per sequence, so step durations form an arithmetic series:
    `end_s(k) = start_s + k*first_s + growth_s*k*(k-1)/2`. A single mixed step is a run of one.
    """

    start_s: float
    first_s: float
    growth_s: float
    steps: int

    def end_s(self, steps: int) -> float:
        """Engine time at which the first `steps` steps of the run have ended."""
        return self.start_s + steps * self.first_s + self.growth_s * (steps * (steps - 1) / 2)

    def only(self, steps: int) -> "DecodeRun":
        """Return a run of only the first `steps` steps."""
        return DecodeRun(self.start_s, self.first_s, self.growth_s, steps)

    def after(self, done: int) -> "DecodeRun":
        """Return the rest of the run after its first `done` steps."""
        first_s = self.first_s + done * self.growth_s
        return DecodeRun(self.end_s(done), first_s, self.growth_s, self.steps - done)

    def steps_by(self, now_s: float) -> int:
        """Count the steps that have ended by `now_s`."""
        elapsed_s = now_s - self.start_s
        if elapsed_s <= 0:
            return 0
        half = self.growth_s / 2
        linear = self.first_s - half
        root = math.sqrt(linear * linear + 4 * half * elapsed_s) + linear
        steps = min(self.steps, int(2 * elapsed_s / root))
        # The root is rounded. The driver's wake-up times come from end_s, so end_s decides.
        while steps < self.steps and self.end_s(steps + 1) <= now_s:
            steps += 1
        while steps > 0 and self.end_s(steps) > now_s:
            steps -= 1
        return steps
