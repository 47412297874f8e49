"""Every option of the proxy, declared once: flag, TOML key, environment variable, range and help.

The field's name gives `--kebab-case`, `snake_case` and `CACHE_PROXY_UPPER_CASE`; its type gives the
allowed range; its `Option` gives topic, help and unit. Times are seconds, sizes bytes.
"""

from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from proxy.config.model import After, Before, Model, OptionError
from proxy.config.secrets import (
    KEYS_FORM,
    SecretStr,
    checked_keys,
    is_loopback,
    long_enough,
    secret_text,
)
from proxy.config.sources import Option
from proxy.config.values import (
    INSTANCE_FORM,
    WEIGHTS_FORM,
    ByteSize,
    InstanceSpec,
    TenantWeight,
    cidr_list,
    instance_list,
    weight_list,
)
from proxy.core.placement.alternatives import MOST_KEPT

LISTENING = "Listening"
ACCESS = "Access and TLS"
INSTANCES = "Instances"
CLASSES = "Route classes"
PLACEMENT = "Placement and sessions"
OFFLOAD = "Prefill offload"
GATE = "Busy gate"
QUEUE = "Wait queue and limits"
TIMEOUTS = "Timeouts"
OBSERVING = "Watching the instances"
LOGS = "Logs"
WORD = r"^\S+$"
Word = Annotated[str, Meta(pattern=WORD)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Count = Annotated[int, Meta(ge=1)]
Tokens = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Instances = Annotated[tuple[InstanceSpec, ...], Before(instance_list), Meta(min_length=1)]
Networks = Annotated[tuple[IPv4Network | IPv6Network, ...], Meta(min_length=1)]
SECRET_FORM = "text, never shown, or @FILE that holds it, or none"
NEEDS = (
    ("tls_key", "tls_cert"),
    ("tls_client_ca", "tls_cert"),
    ("instance_key", "instance_cert"),
    ("cache_salt_secret", "api_key"),
)
"""The first is of no use without the second."""
OffloadPolicy = Literal["cost", "seed-heuristic", "seed-cost", "threshold", "never", "always"]
MIB = 1 << 20


def _number(value: object) -> object:
    return int(value) if isinstance(value, str) and value.isdecimal() else value


class Settings(Model):
    """KV-cache-aware reverse proxy for a fleet of vLLM instances, with P2P prefill offload."""

    config: Annotated[Path | None, Option(LISTENING, "TOML file with options.", in_file=False)] = (
        None
    )
    host: Annotated[Word, Option(LISTENING, "Address to listen on.")] = "0.0.0.0"
    port: Annotated[Port, Option(LISTENING, "Port to listen on; 0 lets the kernel choose.")] = 8000
    admin_host: Annotated[
        Word, Option(LISTENING, "Address of the admin listener, see --admin-port.")
    ] = "127.0.0.1"
    admin_port: Annotated[
        int | None,
        Meta(ge=0, le=65535),
        Option(LISTENING, "Admin paths listen here and are 404 on --port; none: all on one."),
    ] = None
    admin_token: Annotated[
        SecretStr | None,
        Before(secret_text),
        Option(
            LISTENING,
            "Admin paths want Authorization: Bearer with this; none: open.",
            allowed=SECRET_FORM,
            reloadable=True,
        ),
    ] = None
    max_body_bytes: Annotated[
        ByteSize,
        Meta(ge=1024),
        Option(LISTENING, "A larger request body is refused with 413.", "bytes"),
    ] = ByteSize(32 * MIB)
    header_timeout: Annotated[
        Seconds, Option(LISTENING, "A request's head, from its first byte to its end.", "s")
    ] = 10.0
    body_timeout: Annotated[
        Seconds,
        Option(
            LISTENING,
            "A client's body, from its head to its end; past a third of it not below 1 KiB/s.",
            "s",
            reloadable=True,
        ),
    ] = 30.0
    drain_seconds: Annotated[
        NonNegative,
        Option(
            LISTENING,
            "After SIGTERM, running requests have this long to finish.",
            "s",
            reloadable=True,
        ),
    ] = 30.0
    handover_seconds: Annotated[
        NonNegative,
        Option(
            LISTENING,
            "After a hot restart, the replaced process has this long for what it still serves.",
            "s",
            reloadable=True,
        ),
    ] = 3600.0
    pid_file: Annotated[
        Path | None,
        Option(LISTENING, "Holds the process's id; after a hot restart, that of the new one."),
    ] = None
    response_headers: Annotated[
        bool,
        Option(
            LISTENING,
            "Tell the client instance, route and reason in X-Cache-Proxy-* headers.",
            reloadable=True,
        ),
    ] = True

    api_key: Annotated[
        SecretStr | None,
        Before(secret_text),
        After(checked_keys),
        Option(
            ACCESS,
            "Clients need one of these as Authorization: Bearer, or x-api-key; none: open. "
            "A key's tenant is the name before it.",
            allowed=f"{KEYS_FORM}, or none",
            reloadable=True,
        ),
    ] = None
    cache_salt_secret: Annotated[
        SecretStr | None,
        Before(secret_text),
        After(long_enough),
        Option(
            ACCESS,
            "Tenants share no KV: bodies get a cache_salt made of this and the tenant; prefixes "
            "are kept apart too, and X-Cache-Proxy-* headers are not sent.",
            allowed="16 bytes or more, or @FILE that holds them, or none",
            reloadable=True,
        ),
    ] = None
    tls_cert: Annotated[
        Path | None,
        Option(
            ACCESS, "PEM chain for clients: the port speaks TLS, 1.2 or newer.", reloadable=True
        ),
    ] = None
    tls_key: Annotated[
        Path | None, Option(ACCESS, "Its private key; none: it is in --tls-cert.", reloadable=True)
    ] = None
    tls_client_ca: Annotated[
        Path | None,
        Option(ACCESS, "Clients need a certificate that one of these CAs signed.", reloadable=True),
    ] = None
    instance_api_key: Annotated[
        SecretStr | None,
        Before(secret_text),
        Option(
            ACCESS,
            "Sent to the instances instead of a client's Authorization.",
            allowed=SECRET_FORM,
            reloadable=True,
        ),
    ] = None
    instance_ca: Annotated[
        Path | None,
        Option(
            ACCESS, "CAs that https instances are verified by; none: the system's.", reloadable=True
        ),
    ] = None
    instance_cert: Annotated[
        Path | None,
        Option(ACCESS, "PEM chain shown to https instances that ask for one.", reloadable=True),
    ] = None
    instance_key: Annotated[
        Path | None,
        Option(ACCESS, "Its private key; none: it is in --instance-cert.", reloadable=True),
    ] = None
    allow_cidr: Annotated[
        Networks | None,
        Before(cidr_list),
        Option(
            ACCESS,
            "Where instances that are added at run time may be; none: where --instances are.",
            allowed="networks like 10.0.0.0/8,fd00::/8, or none",
            reloadable=True,
        ),
    ] = None

    instances: Annotated[
        Instances,
        Option(
            INSTANCES,
            "vLLM servers, comma separated (TOML: an array). With Mooncake one without bootstrap, "
            "its bootstrap server, never prefills for another.",
            allowed=INSTANCE_FORM,
            reloadable=True,
        ),
    ]
    model: Annotated[
        str | None,
        Meta(pattern=WORD),
        Option(
            INSTANCES,
            "Model served; none: learned from the instances' /v1/models.",
            reloadable=True,
        ),
    ] = None
    prefill_throughput: Annotated[
        float,
        Meta(gt=0),
        Option(INSTANCES, "Prefill speed of one instance.", "tokens/s"),
    ] = 20000.0
    max_num_batched_tokens: Annotated[
        Count,
        Option(
            INSTANCES, "The engines' token budget per step (the vLLM flag of that name).", "tokens"
        ),
    ] = 8192

    warm_threshold: Annotated[
        Tokens,
        Option(
            CLASSES,
            "A request with fewer new (uncached) tokens is WARM.",
            "tokens",
            reloadable=True,
        ),
    ] = 1500
    heavy_threshold: Annotated[
        Tokens,
        Option(
            CLASSES,
            "A request with this many new tokens or more is HEAVY.",
            "tokens",
            reloadable=True,
        ),
    ] = 8192

    placement: Annotated[
        Literal["affinity", "least-tokens", "round-robin"],
        Option(PLACEMENT, "How the decode instance of a new session is chosen.", reloadable=True),
    ] = "affinity"
    session_ttl: Annotated[
        Seconds, Option(PLACEMENT, "An idle session is forgotten after this time.", "s")
    ] = 3600.0
    max_sessions: Annotated[
        Count, Option(PLACEMENT, "Sessions remembered; beyond it the longest idle is forgotten.")
    ] = 100_000
    slow_start: Annotated[
        NonNegative,
        Option(
            PLACEMENT,
            "A returned instance takes part in a tenth of the placements, more until this time.",
            "s",
        ),
    ] = 30.0
    prefix_cache_bytes: Annotated[
        ByteSize,
        Meta(ge=MIB),
        Option(PLACEMENT, "Memory for the record of which instance holds which prefix.", "bytes"),
    ] = ByteSize(256 * MIB)

    kv_connector: Annotated[
        Literal["mooncake", "nixl", "implicit", "none"],
        Option(
            OFFLOAD,
            "How the engines move KV between each other; implicit: through a store they share; "
            "none: never offload.",
        ),
    ] = "mooncake"
    offload_policy: Annotated[
        OffloadPolicy,
        Option(
            OFFLOAD,
            "Who computes what: cost prices every place; others rule on HEAVY only.",
            reloadable=True,
        ),
    ] = "cost"
    shadow_policy: Annotated[
        OffloadPolicy | None,
        Option(
            OFFLOAD,
            "A policy that only looks: logged and counted is what it would have done.",
            reloadable=True,
        ),
    ] = None
    offload_non_cached_tokens: Annotated[
        Tokens,
        Option(
            OFFLOAD,
            "Policy threshold: offload from this many new tokens on; 0: never.",
            "tokens",
            reloadable=True,
        ),
    ] = 512
    kv_transfer_time: Annotated[
        NonNegative, Option(OFFLOAD, "Cost of one KV transfer that the policies assume.", "s")
    ] = 0.5
    ttft_slo: Annotated[
        Seconds,
        Option(
            OFFLOAD,
            "Target for the first token, 0.1 ms more per new token: counted in the metrics.",
            "s",
            reloadable=True,
        ),
    ] = 2.0
    tpot_slo: Annotated[
        Seconds,
        Option(
            OFFLOAD,
            "The cost policy's target for an answer's time per token; 9 of 10 should keep it.",
            "s",
            reloadable=True,
        ),
    ] = 0.05
    kv_pin_timeout: Annotated[
        NonNegative,
        Option(
            OFFLOAD,
            "How long an instance may hold KV that nobody fetched "
            "(VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT); it counts against its room that long.",
            "s",
        ),
    ] = 480.0
    hedge: Annotated[
        bool,
        Option(
            OFFLOAD,
            "Compute on the decode instance too when a prefill leg is late.",
            reloadable=True,
        ),
    ] = True

    active_decode_blocks_threshold: Annotated[
        float | None,
        Meta(ge=0, le=1),
        Option(
            GATE,
            "An instance using a larger part of its KV blocks is busy.",
            "ratio",
            reloadable=True,
        ),
    ] = None
    active_prefill_tokens_threshold: Annotated[
        int | None,
        Meta(ge=0),
        Option(
            GATE,
            "An instance with more tokens waiting for prefill is busy.",
            "tokens",
            reloadable=True,
        ),
    ] = None
    active_prefill_tokens_threshold_frac: Annotated[
        float | None,
        Meta(ge=0),
        Option(GATE, "The same as a multiple of max_num_batched_tokens.", "ratio", reloadable=True),
    ] = None
    overload_status: Annotated[
        Literal[503, 529],
        Before(_number),
        Option(GATE, "HTTP status of the answer when every instance is busy.", reloadable=True),
    ] = 503

    max_queue: Annotated[
        int,
        Meta(ge=0),
        Option(QUEUE, "Requests that may wait while every instance is busy; 0: refuse at once."),
    ] = 256
    max_queue_bytes: Annotated[
        ByteSize,
        Meta(ge=0),
        Option(QUEUE, "Their bodies together.", "bytes"),
    ] = ByteSize(64 * MIB)
    max_queue_seconds: Annotated[
        Seconds,
        Option(QUEUE, "Longest wait; who is predicted to wait longer is refused at once.", "s"),
    ] = 10.0
    tenant_weights: Annotated[
        tuple[TenantWeight, ...],
        Before(weight_list),
        Option(
            QUEUE,
            "Shares of the turns of --api-key's tenants; one not named has weight 1.",
            allowed=WEIGHTS_FORM,
        ),
    ] = ()

    max_connections: Annotated[
        int | None,
        Meta(ge=1),
        Option(
            QUEUE, "Client connections; more get a 503. None: 0.45 of the descriptors, less 32."
        ),
    ] = None
    max_memory_bytes: Annotated[
        ByteSize | None,
        Meta(ge=64 * MIB),
        Option(
            QUEUE,
            "Near it keep-alive is refused, nearer HEAVY requests, then all. None: the cgroup's.",
            "bytes",
        ),
    ] = None

    connect_timeout: Annotated[Seconds, Option(TIMEOUTS, "TCP connect to an instance.", "s")] = 2.0
    prefill_timeout: Annotated[
        Seconds,
        Option(
            TIMEOUTS,
            "The prefill leg of an offload, at most; then the request is colocated. 2 s + 3 x its "
            "late bound, where that is less.",
            "s",
            reloadable=True,
        ),
    ] = 120.0
    transfer_timeout: Annotated[
        Seconds,
        Option(
            TIMEOUTS,
            "Prefill done to the decode instance's first byte, at most; then colocated. 2 s + 3 x "
            "its queue and the transfer's late bound, where that is less.",
            "s",
            reloadable=True,
        ),
    ] = 30.0
    ttft_timeout: Annotated[
        Seconds,
        Option(
            TIMEOUTS,
            "Request sent to the first byte, at most; of a stream 5 s + 3 x the late bound of its "
            "prefill, where that is less and another instance can be asked.",
            "s",
            reloadable=True,
        ),
    ] = 300.0
    idle_timeout: Annotated[
        Seconds,
        Option(
            TIMEOUTS,
            "Between two pieces of an answer, at most; 60 s, 200 steps and the instance's prefill "
            "queue, where that is less.",
            "s",
            reloadable=True,
        ),
    ] = 300.0
    heartbeat_interval: Annotated[
        NonNegative,
        Option(
            TIMEOUTS,
            "A stream that has begun and is silent gets a comment this often; 0: never.",
            "s",
        ),
    ] = 15.0
    total_timeout: Annotated[
        Seconds, Option(TIMEOUTS, "One request from end to end.", "s", reloadable=True)
    ] = 3600.0

    scrape_interval: Annotated[
        Seconds, Option(OBSERVING, "Between two reads of an instance's /metrics.", "s")
    ] = 2.0
    health_interval: Annotated[
        Seconds,
        Option(OBSERVING, "Between two health checks of an instance, a fifth more or less.", "s"),
    ] = 2.0
    health_timeout: Annotated[
        Seconds, Option(OBSERVING, "A slower health check has failed.", "s", reloadable=True)
    ] = 1.0

    request_log: Annotated[
        Path | None, Option(LOGS, "File that gets one JSON object per finished request.")
    ] = None
    log_candidates: Annotated[
        int,
        Meta(ge=0, le=MOST_KEPT),
        Option(
            LOGS,
            "Options of a decision that a line lists: the cheapest, and the one taken.",
            reloadable=True,
        ),
    ] = MOST_KEPT
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Option(LOGS, "Least severity logged.")
    ] = "info"
    log_format: Annotated[Literal["text", "json"], Option(LOGS, "Form of the log on stderr.")] = (
        "text"
    )

    def check(self) -> None:
        """Raise OptionError where values do not go together."""
        if self.warm_threshold > self.heavy_threshold:
            raise _pair("warm_threshold", "must not be larger than", "heavy_threshold")
        for name, other in NEEDS:
            if getattr(self, name) is not None and getattr(self, other) is None:
                raise _pair(name, "is of no use with", other)
        is_open = self.admin_port is not None and self.admin_token is None
        if is_open and not is_loopback(self.admin_host):
            raise _pair(
                "admin_host", "is no loopback address, which is refused with", "admin_token"
            )


def _pair(name: str, what: str, other: str) -> OptionError:
    return OptionError(name, what, (name, other))
