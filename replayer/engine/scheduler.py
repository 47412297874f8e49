"""The scheduler of one engine: the batch of a step, the queue and the blocks. Pure.

The rules are those of vLLM's V1 scheduler. Running requests come first, in order of admission: one
token for each that decodes, then unfinished prefills with the rest of the budget. When blocks run
out, the request admitted last loses all its blocks and queues at the head (recompute is the only
form of preemption). Waiting requests follow in order of arrival, each only when its whole known
text fits. No request overtakes a head of the queue that does not fit. A prefix hit is whole blocks
and never the full prompt: at least one token is computed, since only that yields the next one.
"""

from collections import deque
from dataclasses import dataclass, field

from replayer.engine.costs import StepCost
from replayer.engine.kvcache import BlockPool, SharedStore
from replayer.engine.types import Counters, EngineOptions, SimRequest


@dataclass(slots=True)
class Work:
    """One step's batch; `steps` > 1 if exactly this batch is known to repeat that often."""

    chunks: list[tuple[SimRequest, int]] = field(default_factory=list)
    decodes: list[SimRequest] = field(default_factory=list)
    wanted: list[SimRequest] = field(default_factory=list)
    """Requests that have their blocks and now load KV from another engine or the store."""
    steps: int = 1
    preempted: bool = False

    @property
    def empty(self) -> bool:
        """Whether the step has nothing to compute."""
        return not self.chunks and not self.decodes

    def step_s(self, cost: StepCost) -> float:
        """Duration of the first step, in seconds."""
        prefill, pairs, firsts = 0, 0.0, 0
        for request, tokens in self.chunks:
            prefill += tokens
            pairs += tokens * (request.computed_tokens + tokens / 2)
            firsts += request.computed_tokens + tokens == request.known_tokens
        kv = sum([request.computed_tokens for request in self.decodes])
        return cost.step_s(prefill, pairs, len(self.decodes), kv, firsts)

    def drop(self, gone: SimRequest) -> None:
        """Remove an aborted request from the running step."""
        self.decodes = [request for request in self.decodes if request is not gone]
        self.chunks = [chunk for chunk in self.chunks if chunk[0] is not gone]


class Scheduler:
    """The running batch, the waiting queue and the block pool of one engine."""

    def __init__(
        self, options: EngineOptions, counters: Counters, store: SharedStore | None = None
    ) -> None:
        self._options = options
        self._store = store
        self._block = options.block_size
        self._counters = counters
        self.pool = BlockPool(options.num_blocks)
        self.running: list[SimRequest] = []
        self.waiting: deque[SimRequest] = deque()

    def plan(self, at_s: float) -> Work:
        """Choose the batch of the step that begins at `at_s` and give it its blocks."""
        work = Work()
        budget = self._continue(work)
        if not work.preempted:
            budget = self._admit(work, budget, at_s)
            # With budget left and no chunk, the queue is empty or its head does not fit: only an
            # event changes that.
            if budget > 0 and work.decodes and not work.chunks:
                work.steps = self._foreseeable_steps(work.decodes)
        return work

    def commit(self, work: Work, steps: int) -> list[SimRequest]:
        """Book `steps` finished steps; return the requests that got their first or last token."""
        notable = []
        for request, tokens in work.chunks:
            request.computed_tokens += tokens
            self.publish(request)
            if request.computed_tokens == request.known_tokens:
                if request.job.output_tokens:
                    request.known_tokens += 1
                    request.output_tokens += 1
                    self._counters.generated += 1
                notable.append(request)
        for request in work.decodes:
            request.computed_tokens += steps
            request.known_tokens += steps
            request.output_tokens += steps
            if request.computed_tokens > request.room_tokens:
                self._grow(request, request.computed_tokens)
            if request.output_tokens == request.job.output_tokens:
                notable.append(request)
        self._counters.generated += steps * len(work.decodes)
        self._counters.steps += steps
        return notable

    def publish(self, request: SimRequest) -> None:
        """Make the full blocks whose KV is in place addressable."""
        full = min(request.computed_tokens // self._block, len(request.hashes))
        if full == request.hashed_blocks:
            return
        hashes = request.hashes[request.hashed_blocks : full]
        self.pool.publish(request.holding, hashes, request, request.hashed_blocks)
        if self._store is not None:
            self._store.write(hashes)
        request.hashed_blocks = full

    def release(self, request: SimRequest) -> None:
        """Release a request's blocks; full ones, generated ones included, stay cached."""
        generated = request.job.output_hashes(request.output_tokens)
        if generated:
            request.hashes = [*request.job.block_hashes, *generated]
        self.publish(request)
        self.pool.release(request.holding)
        request.hashed_blocks = request.room_tokens = 0

    def _continue(self, work: Work) -> int:
        """Schedule the running requests; return the budget left over."""
        running = self.running
        budget = self._options.max_num_batched_tokens
        index = 0
        while index < len(running) and budget > 0:
            request = running[index]
            missing = request.known_tokens - request.computed_tokens
            if missing == 1 and request.output_tokens:
                upto = request.computed_tokens + 1
                if upto > request.room_tokens and not self._make_room(request, upto, work):
                    break
                work.decodes.append(request)
                budget -= 1
            else:
                tokens = min(missing, budget)
                work.chunks.append((request, tokens))
                budget -= tokens
            index += 1
        return budget

    def _admit(self, work: Work, budget: int, at_s: float) -> int:
        """Move waiting requests into the step while budget, seats and blocks last."""
        waiting = self.waiting
        while waiting and budget > 0 and len(self.running) < self._options.max_num_seqs:
            request = waiting[0]
            if not request.holding.blocks and not self._place(request, at_s):
                break
            waiting.popleft()
            if request.fetch_pending:
                request.fetch_pending = False
                work.wanted.append(request)
                continue
            tokens = min(request.known_tokens - request.computed_tokens, budget)
            self.running.append(request)
            work.chunks.append((request, tokens))
            budget -= tokens
        return budget

    def _place(self, request: SimRequest, at_s: float) -> bool:
        """Find the prefix hit and take blocks for all known text; False changes nothing."""
        pool = self.pool
        if request.refused_at_release == pool.releases:
            return False
        hits = pool.match(request.hashes, (request.known_tokens - 1) // self._block)
        found = request.hashes[:hits]
        need = -(-request.known_tokens // self._block) - hits
        # The exact room costs a pass over the hits, so it is computed only if it may decide.
        if need > pool.free_blocks - hits and need > pool.room_beside(found):
            request.refused_at_release = pool.releases
            return False
        pool.hold(request.holding, found)
        pool.allocate(request.holding, need)
        request.room_tokens = (hits + need) * self._block
        request.hashed_blocks = hits
        request.computed_tokens = hits * self._block
        if request.scheduled_s is None:
            request.scheduled_s = at_s
            self._plan_load(request, hits)
            self._count_hits(request)
        return True

    def _plan_load(self, request: SimRequest, hits: int) -> None:
        """Decide what to load: the whole prompt from another engine, or the blocks in the store."""
        if request.fetch_pending:
            request.fetch_tokens = request.job.prompt_tokens
        elif self._store is not None:
            limit = (request.known_tokens - 1) // self._block
            stored = self._store.match(request.hashes, limit)
            request.fetch_tokens = stored * self._block
            request.fetch_pending = stored > hits

    def _count_hits(self, request: SimRequest) -> None:
        """Count the hits of a first scheduling; like vLLM, external ones even if not delivered."""
        prompt, hit = request.job.prompt_tokens, request.computed_tokens
        request.local_hit_tokens = hit
        self._counters.prefix_queries += prompt
        self._counters.prefix_hits += hit
        self._counters.external_queries += prompt - hit
        if request.fetch_pending:
            self._counters.external_hits += request.fetch_tokens - hit

    def _grow(self, request: SimRequest, upto: int) -> bool:
        """Extend a request's blocks to hold `upto` tokens; False if the pool has too few."""
        need = -(-upto // self._block) - request.room_tokens // self._block
        if not self.pool.allocate(request.holding, need):
            return False
        request.room_tokens += need * self._block
        return True

    def _make_room(self, request: SimRequest, upto: int, work: Work) -> bool:
        """Extend a running request's blocks, preempting others; False if it lost its own."""
        while not self._grow(request, upto):
            victim = self.running.pop()
            self.release(victim)
            victim.computed_tokens = 0
            victim.preemptions += 1
            victim.refused_at_release = None
            self.waiting.appendleft(victim)
            self._counters.preemptions += 1
            work.preempted = True
            if victim is request:
                return False
        return True

    def _foreseeable_steps(self, decodes: list[SimRequest]) -> int:
        """Number of steps until a request finishes, as far as the free blocks surely suffice."""
        steps = min([request.job.output_tokens - request.output_tokens for request in decodes])
        free = self.pool.free_blocks
        while steps > 1 and len(decodes) * (steps // self._block + 1) > free:
            steps //= 2
        return steps
