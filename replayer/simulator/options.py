"""Every option of `engine-sim`, declared once: name, default, unit, range and help.

The fields are also the flags of the command line (`cli`) and the keyword arguments of `SimFleet`.
"""

from dataclasses import dataclass, field, fields
from typing import Any, get_args

from replayer.engine.costs import StepCost, TransferCost
from replayer.engine.gpus import plant_options
from replayer.engine.heat import PlantName, PlantOptions
from replayer.engine.types import NULL_BLOCKS, EngineOptions
from replayer.simulator.openai.kv_params import READERS

_STEP, _TRANSFER, _ENGINE = StepCost(), TransferCost(), EngineOptions()
POLICIES = ("recompute", "fail")
CONNECTORS = tuple(READERS)
PLANTS = get_args(PlantName)
_WORDS = {"kv_load_failure_policy": POLICIES, "kv_connector": CONNECTORS, "plant": PLANTS}
"""Options that are one word of a list."""
_NO_SLOTS = 1 << 20
"""Practically no limit, since NIXL has no sender slots."""


def _option(default: Any, help_: str, *, least: float | None = None, **extra: Any) -> Any:
    return field(default=default, metadata={"help": help_, "least": least, **extra})


@dataclass(frozen=True, slots=True)
class SimOptions:
    """Options of one simulated engine; times are engine seconds unless the help says real."""

    model: str = _option("sim-8b", "served model name")
    host: str = _option("127.0.0.1", "address to listen on")
    speed: float = _option(1.0, "engine seconds per real second", least=1e-3)
    tick: float = _option(
        0.008,
        "shortest time between two writes to a stream, real seconds; merges tokens",
        least=0.0,
    )
    block_size: int = _option(_ENGINE.block_size, "tokens per KV block", least=1)
    num_gpu_blocks: int = _option(
        _ENGINE.num_blocks + 1, "KV blocks per engine; vLLM never uses one of them", least=2
    )
    max_num_batched_tokens: int = _option(
        _ENGINE.max_num_batched_tokens, "token budget of one step", least=1
    )
    max_num_seqs: int = _option(_ENGINE.max_num_seqs, "most running requests", least=1)
    max_model_len: int = _option(
        _ENGINE.max_model_len, "most tokens of prompt and output together", least=2
    )
    max_num_queued_reqs: int | None = _option(
        None, "waiting requests from which a new request gets a 503 (default: unlimited)", least=0
    )
    a0: float = _option(_STEP.a0, "step time: fixed part, seconds", least=1e-6)
    a1: float = _option(_STEP.a1, "step time: seconds per prefill token", least=0.0)
    a2: float = _option(_STEP.a2, "step time: seconds per decoding sequence", least=0.0)
    a3: float = _option(_STEP.a3, "step time: seconds per KV token decoded over", least=0.0)
    a4: float = _option(_STEP.a4, "step time: seconds per prefill token and context", least=0.0)
    x0: float = _option(_TRANSFER.x0, "KV transfer: fixed part, seconds", least=0.0)
    bandwidth: float = _option(
        _TRANSFER.bandwidth, "KV transfer: bytes per second of one transfer", least=1.0
    )
    bytes_per_token: int = _option(
        _TRANSFER.bytes_per_token, "KV transfer: bytes per token", least=1
    )
    sender_slots: int = _option(_ENGINE.sender_slots, "transfers an engine sends at once", least=1)
    abort_timeout: float = _option(
        _ENGINE.abort_timeout_s,
        "how long unclaimed KV stays pinned, and an orphan pull keeps its slot, seconds",
        least=0.0,
    )
    kv_connector: str = _option(
        "mooncake", "how engines move KV: P sends, D reads, or a shared store", choices=CONNECTORS
    )
    kv_lease: float = _option(
        30.0,
        "how long unclaimed KV stays pinned with nixl, seconds",
        least=0.0,
    )
    kv_load_failure_policy: str = _option(
        "recompute", "result of a decode leg whose KV never comes", choices=POLICIES
    )
    natural_length: int = _option(
        256, "mean output tokens of a request without its own limit", least=1
    )
    eos_with_limit: bool = _option(
        default=False,
        help_="let outputs end before max_tokens too (unless ignore_eos)",
    )
    tool_calls: int | None = _option(
        None,
        "play a model that makes this many calls of the client's shell after each user message, "
        "then says that it is done; without it answers are words",
        least=0,
    )
    thermal: bool = _option(
        default=False,
        help_="simulate the temperature of GPUs, reported as by dcgm-exporter at /dcgm/metrics",
    )
    plant: str = _option(
        "first-order", "with --thermal: the plant, from power to temperature", choices=PLANTS
    )
    gpus: int = _option(1, "with --thermal: GPUs per engine, which share its work", least=1)
    ambient_celsius: float = _option(32.0, "with --thermal: air temperature, degrees", least=0.0)
    hot_gpu: int | None = _option(
        None, "with --thermal: index of a GPU that is 6 degrees hotter than the others", least=0
    )

    def __post_init__(self) -> None:
        """Refuse values out of range, naming option, value and range."""
        for spec in fields(self):
            value, least = getattr(self, spec.name), spec.metadata["least"]
            if least is not None and value is not None and not value >= least:
                raise ValueError(f"{flag(spec.name)} {value}: must be at least {least:g}")
        for name, choices in _WORDS.items():
            if getattr(self, name) not in choices:
                given, all_ = getattr(self, name), ", ".join(choices)
                raise ValueError(f"{flag(name)} {given}: must be one of {all_}")
        self.heat()
        most = (self.num_gpu_blocks - NULL_BLOCKS) * self.block_size
        if self.max_model_len > most:
            raise ValueError(
                f"--max-model-len {self.max_model_len}: must be at most {most}, "
                "what the KV cache can hold in tokens"
            )

    def heat(self) -> PlantOptions:
        """Return the options of the GPUs; ValueError for a hot GPU that is not there."""
        if self.hot_gpu is not None and self.hot_gpu >= self.gpus:
            raise ValueError(f"--hot-gpu {self.hot_gpu}: must be 0 to {self.gpus - 1}")
        return plant_options(self.gpus, self.ambient_celsius, self.hot_gpu)

    @property
    def plant_name(self) -> PlantName:
        """The plant, by its name."""
        return "harness" if self.plant == "harness" else "first-order"

    @property
    def kv_bytes(self) -> int:
        """The size of the whole KV cache."""
        return self.num_gpu_blocks * self.block_size * self.bytes_per_token

    def engine(self) -> EngineOptions:
        """Return the options of the engine model."""
        reads = self.kv_connector == "nixl"
        return EngineOptions(
            block_size=self.block_size,
            num_blocks=self.num_gpu_blocks - NULL_BLOCKS,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            step=StepCost(self.a0, self.a1, self.a2, self.a3, self.a4),
            transfer=TransferCost(self.x0, self.bytes_per_token, self.bandwidth),
            sender_slots=_NO_SLOTS if reads else self.sender_slots,
            abort_timeout_s=self.kv_lease if reads else self.abort_timeout,
            reads_anything=reads,
            recompute_failed_loads=self.kv_load_failure_policy == "recompute",
        )


def flag(name: str) -> str:
    """Return the command-line flag of an option."""
    return "--" + name.replace("_", "-")
