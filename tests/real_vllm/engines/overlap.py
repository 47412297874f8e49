"""Drives the plugin's scheduler with two steps under way, as an engine with a GPU does.

Runs in the engines' environment: `overlap.py MODEL`. vLLM forbids overlapping steps on a CPU, so
its scheduler is driven without an engine. In place of a model stands a function of request and
position: what is sampled twice, or delivered in another order, is another output. Prints a line
of JSON for each case.
"""

from __future__ import annotations

import sys
import tempfile
from collections import deque
from typing import Any

import msgspec
import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from vllm_thermal.control import VICTIMS
from vllm_thermal.scheduler import ThermalScheduler

BLOCK_TOKENS, BLOCKS, STEP_TOKENS = 16, 4000, 128
REQUESTS, OUTPUT_TOKENS = 8, 60
UNDER_WAY = 2
MOST_STEPS = 5000
TOLD = "told: "
"""What each line about a case begins with; vLLM writes others."""


def configured(model: str, folder: str | None) -> Any:
    """An engine's configuration; it takes over KV where `folder` is its store."""
    transfer = folder and KVTransferConfig(
        kv_connector="ExampleConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"shared_storage_path": folder},
    )
    config = VllmConfig(
        model_config=ModelConfig(model=model, dtype="float32", max_model_len=4096),
        scheduler_config=SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=STEP_TOKENS,
            max_model_len=4096,
            is_encoder_decoder=False,
        ),
        cache_config=CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True),
        device_config=DeviceConfig("cpu"),
        **({"kv_transfer_config": transfer} if transfer else {}),
    )
    config.cache_config.num_gpu_blocks = BLOCKS
    config.scheduler_config.async_scheduling = True  # what the CPU platform takes back
    assert config.max_concurrent_batches == UNDER_WAY
    return config


def made(config: Any) -> Any:
    """A scheduler by a configuration."""
    spec = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=32, dtype=torch.float32
    )
    groups = [KVCacheGroupSpec(["layer"], spec)]
    return ThermalScheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_TOKENS,
        hash_block_size=BLOCK_TOKENS,
    )


def token(request_id: str, position: int) -> int:
    """What the model says there."""
    return 300 + (hash((int(request_id), position)) % 3000)


class Model:
    """Samples where a step reaches the end of what is known of a request."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def run(self, step: Any) -> ModelRunnerOutput:
        """What a step gives."""
        starts = {}
        for new in step.scheduled_new_reqs:
            self._known[new.req_id] = len(new.prompt_token_ids)
            starts[new.req_id] = new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        for at, name in enumerate(cached.req_ids):
            starts[name] = cached.num_computed_tokens[at]
            if name in cached.resumed_req_ids:
                self._known[name] = prompt_tokens(name) + cached.num_output_tokens[at]
        names, sampled = list(step.num_scheduled_tokens), []
        for name in names:
            end = starts[name] + step.num_scheduled_tokens[name]
            assert end <= self._known[name], "a token is computed that nobody has sampled"
            sampled.append([token(name, end)] if end == self._known[name] else [])
            self._known[name] += len(sampled[-1])
        index = {name: at for at, name in enumerate(names)}
        return ModelRunnerOutput(names, index, sampled)


def prompt_tokens(request_id: str) -> int:
    """Of each prompt: some take several steps."""
    return 40 + 90 * int(request_id)


def run(scheduler: Any, victim: str) -> tuple[list[list[int]], int]:
    """Outputs of the requests, and the steps that running fell in at most."""
    hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
    for at in range(REQUESTS):
        name, params = str(at), SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        params.update_from_generation_config({}, 1)
        prompt = [token(name, -1 - i) for i in range(prompt_tokens(name))]
        scheduler.add_request(Request(name, prompt, params, None, block_hasher=hasher))
    found: dict[str, list[int]] = {str(at): [] for at in range(REQUESTS)}
    model, under_way, slowest = Model(), deque[Any](), 0
    for number in range(MOST_STEPS):
        if not scheduler.has_requests():
            break
        if number % 12 == 6:
            scheduler.thermal_set({"cap": 2, "victim": victim})
        if number % 12 == 11:
            steps = scheduler.thermal_get()["steps_to_limit"]
            slowest = MOST_STEPS if steps is None else max(slowest, steps)
            scheduler.thermal_set({"cap": None})
        step = scheduler.schedule()
        under_way.append((step, model.run(step)))
        if len(under_way) == UNDER_WAY or not step.total_num_scheduled_tokens:
            _over(scheduler, under_way, found)
    while under_way:
        _over(scheduler, under_way, found)
    assert not scheduler.has_unfinished_requests()
    scheduler.schedule()
    assert scheduler.kv_cache_manager.usage == 0.0, "blocks are held"
    return [found[str(at)] for at in range(REQUESTS)], slowest


def _over(scheduler: Any, under_way: deque[Any], found: dict[str, list[int]]) -> None:
    """The oldest step is over."""
    for outputs in scheduler.update_from_output(*under_way.popleft()).values():
        for output in outputs.outputs:
            found[output.request_id] += output.new_token_ids


def main() -> None:
    """Every victim policy, with and without a KV connector."""
    init_none_hash(sha256)
    want = [
        [token(str(at), prompt_tokens(str(at)) + i) for i in range(OUTPUT_TOKENS)]
        for at in range(REQUESTS)
    ]
    with tempfile.TemporaryDirectory() as folder:
        for store in (None, folder):
            config = configured(sys.argv[1], store)
            for victim in sorted(VICTIMS):
                scheduler = made(config)
                assert scheduler.defer_block_free == (store is not None)
                outputs, slowest = run(scheduler, victim)
                told = {
                    "case": f"{victim}, {'a' if store else 'no'} connector",
                    "same": outputs == want,
                    "slowest_steps": slowest,
                    "preempted": scheduler.thermal.preempted,
                    "skipped": scheduler.thermal.skipped,
                }
                sys.stdout.write(f"{TOLD}{msgspec.json.encode(told).decode()}\n")


if __name__ == "__main__":
    main()
