"""Every option of the proxy, declared once: flag, TOML key, environment variable, range and help.

The field's name gives `--kebab-case`, `snake_case` and `CACHE_PROXY_UPPER_CASE`; its type gives the
allowed range; its `Option` gives topic, help and unit. Times are seconds, sizes bytes.
"""

from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from proxy.config.model import After, Before, Model, OptionError
from proxy.config.secrets import (
    KEYS_FORM,
    SecretStr,
    bus_url,
    checked_keys,
    is_loopback,
    long_enough,
    secret_text,
    sendable,
)
from proxy.config.sources import Option
from proxy.config.values import (
    DISCOVER_FORM,
    EVENTS_FORM,
    HEADERS_FORM,
    INSTANCE_FORM,
    ORIGINS_FORM,
    WEIGHTS_FORM,
    ByteSize,
    DiscoverAt,
    InstanceSpec,
    TenantWeight,
    cidr_list,
    discover_list,
    events_text,
    header_list,
    instance_list,
    origin_list,
    path_list,
    weight_list,
)
from proxy.core.placement.alternatives import MOST_KEPT

FLEET = "Fleet"
DECISIONS = "Decisions"
CACHES = "Sessions and caches"
LIMITS = "Limits and queue"
TIMEOUTS = "Timeouts"
NETWORK = "Network and TLS"
ACCESS = "Access"
TELEMETRY = "Telemetry"
PROCESS = "Process"
TOPICS = (
    *(FLEET, DECISIONS, CACHES, LIMITS, TIMEOUTS),
    *(NETWORK, ACCESS, TELEMETRY, PROCESS),
)
"""The groups of `--help`, configs/proxy.toml and docs/reference/options.md, in their order."""
WORD = r"^\S+$"
OTLP_URL = r"^https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?(/[!->@-~]*)?$"
STREAM_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
Word = Annotated[str, Meta(pattern=WORD)]
Port = Annotated[int, Meta(ge=0, le=65535)]
EVERY_ADDRESS = ("0.0.0.0", "::")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
MOST = 10**12
"""Largest count or number of tokens: whatever is computed from it stays finite."""
MOST_S = 1e9
"""Longest time, 31 years."""
MOST_BYTES = 1 << 50
Count = Annotated[int, Meta(ge=1, le=MOST)]
Tokens = Annotated[int, Meta(ge=0, le=MOST)]
Seconds = Annotated[float, Meta(gt=0, le=MOST_S)]
NonNegative = Annotated[float, Meta(ge=0, le=MOST_S)]
Instances = Annotated[tuple[InstanceSpec, ...], Before(instance_list)]
Discoveries = Annotated[tuple[DiscoverAt, ...], Before(discover_list), Meta(max_length=16)]
Networks = Annotated[tuple[IPv4Network | IPv6Network, ...], Meta(min_length=1)]
BUS_FORM = (
    "redis://host:port, rediss://host:port (with TLS) or unix:///path, with a user and its "
    "password where needed, never shown; or @FILE that holds it, or none"
)
SECRET_FORM = "text, never shown, or @FILE that holds it, or none"
NEEDS = (
    ("tls_key", "tls_cert"),
    ("tls_client_ca", "tls_cert"),
    ("instance_key", "instance_cert"),
    ("cache_salt_secret", "api_key"),
    ("salted_paths", "cache_salt_secret"),
    ("share_key", "share"),
)
"""Pairs of options: the first has no effect without the second."""
Late = Literal["serve", "refuse"]
OffloadPolicy = Literal["cost", "seed-heuristic", "seed-cost", "threshold", "never", "always"]
MIB = 1 << 20
MOST_WORKERS = 64
WORKER = "{worker}"
"""Stands for a worker's number in the paths of its logs."""


def _number(value: object) -> object:
    return int(value) if isinstance(value, str) and value.isdecimal() else value


class Settings(Model):
    """KV-cache-aware reverse proxy for a fleet of vLLM instances, with P2P prefill offload."""

    topics: ClassVar[tuple[str, ...]] = TOPICS

    config: Annotated[Path | None, Option(PROCESS, "TOML file with options.", in_file=False)] = None
    host: Annotated[Word, Option(NETWORK, "Address to listen on.")] = "0.0.0.0"
    port: Annotated[Port, Option(NETWORK, "Port to listen on; 0: the kernel chooses.")] = 8000
    admin_host: Annotated[
        Word, Option(NETWORK, "Address of the admin listener; see --admin-port.")
    ] = "127.0.0.1"
    admin_port: Annotated[
        int | None,
        Meta(ge=0, le=65535),
        Option(
            NETWORK,
            "Port of a separate listener for the admin paths; --port then answers them with "
            "404. None: all paths are on --port.",
        ),
    ] = None
    admin_token: Annotated[
        SecretStr | None,
        Before(secret_text),
        After(sendable),
        Option(
            ACCESS,
            "Token that requests to admin paths must send as Authorization: Bearer; none: no "
            "token is required.",
            allowed=SECRET_FORM,
            reloadable=True,
        ),
    ] = None
    enable_admin_api: Annotated[
        bool,
        Option(
            ACCESS,
            "Serve /v1/admin/batch, which caps hot instances and evicts their requests. Needs "
            "--admin-port, and --admin-token or --tls-client-ca.",
        ),
    ] = False
    thermal: Annotated[
        Path | None,
        Option(
            LIMITS,
            "TOML file of thermal control, for instances with a GPU sensor "
            "(;gpus=...;dcgm=...). None: no control. Not hardware validated.",
        ),
    ] = None
    thermal_may_abort: Annotated[
        bool,
        Option(
            LIMITS,
            "In an emergency or by force_evict, end requests of a hot instance that cannot "
            "migrate, with an error event. Without it the proxy waits for them.",
        ),
    ] = False
    max_body_bytes: Annotated[
        ByteSize,
        Meta(ge=1024, le=MOST_BYTES),
        Option(LIMITS, "A larger request body is refused with 413.", "bytes"),
    ] = ByteSize(32 * MIB)
    header_timeout: Annotated[
        Seconds,
        Option(
            TIMEOUTS,
            "Longest time from the first to the last byte of a request's head, and for the "
            "first byte on a new connection.",
            "s",
        ),
    ] = 10.0
    body_timeout: Annotated[
        Seconds,
        Option(
            TIMEOUTS,
            "Longest time for a request's body after its head. After a third of this time the "
            "body must come at 1 KiB/s or faster.",
            "s",
            reloadable=True,
        ),
    ] = 30.0
    drain_seconds: Annotated[
        NonNegative,
        Option(
            PROCESS, "How long running requests may continue after SIGTERM.", "s", reloadable=True
        ),
    ] = 30.0
    handover_seconds: Annotated[
        NonNegative,
        Option(
            PROCESS,
            "How long the replaced process may finish its requests after a hot restart.",
            "s",
            reloadable=True,
        ),
    ] = 3600.0
    pid_file: Annotated[
        Path | None,
        Option(
            PROCESS,
            "File that holds the process id; after a hot restart, the id of the new process.",
        ),
    ] = None
    workers: Annotated[
        int,
        Meta(ge=1, le=MOST_WORKERS),
        Option(
            PROCESS,
            "Processes that serve on the same port; more than 1 need --share. Worker 0, 1, ... "
            "has --admin-port + 0, 1, ..., and its number for {worker} in the paths of logs. "
            "Limits of connections, memory and the queue are divided among them.",
        ),
    ] = 1
    response_headers: Annotated[
        bool,
        Option(
            TELEMETRY,
            "Send X-Cache-Proxy-* headers with instance, route and reason to the client.",
            reloadable=True,
        ),
    ] = True

    api_key: Annotated[
        SecretStr | None,
        Before(secret_text),
        After(checked_keys),
        Option(
            ACCESS,
            "Accepted client keys, sent as Authorization: Bearer or x-api-key; none: no key is "
            "required. The name before the colon is the key's tenant.",
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
            "Secret from which each tenant's cache_salt is made, so that tenants share no KV. "
            "Prefixes are then looked up per tenant, and X-Cache-Proxy-* headers are not sent.",
            allowed="16 bytes or more, or @FILE that holds them, or none",
            reloadable=True,
        ),
    ] = None
    salted_paths: Annotated[
        tuple[str, ...],
        Before(path_list),
        Option(
            ACCESS,
            "Further paths on which every instance applies cache_salt. With "
            "--cache-salt-secret, any other path that computes a prompt is refused. vLLM 0.32 "
            "salts /v1/messages, /v1/embeddings, /v1/rerank and /v1/score.",
            allowed="paths like /v1/messages,/v1/embeddings",
            reloadable=True,
        ),
    ] = ()
    extra_paths: Annotated[
        tuple[str, ...],
        Before(path_list),
        Option(
            ACCESS,
            "Paths to relay beside those of docs/reference/http-api.md; /* at the end: every "
            "path below. An engine's operator paths (/v1/admin, LoRA adapters) are never "
            "relayed.",
            allowed="paths like /v1/images/generations,/v1/images/*",
            reloadable=True,
        ),
    ] = ()
    cors_allowed_origins: Annotated[
        tuple[str, ...],
        Before(origin_list),
        Option(
            ACCESS,
            "Origins whose web pages may use the relayed paths and /v1/models; *: any. Empty: "
            "browsers block pages of other origins.",
            allowed=ORIGINS_FORM,
            reloadable=True,
        ),
    ] = ()
    tls_cert: Annotated[
        Path | None,
        Option(
            NETWORK,
            "PEM certificate chain for clients; if given, both listeners speak TLS 1.2 or newer.",
            reloadable=True,
        ),
    ] = None
    tls_key: Annotated[
        Path | None,
        Option(
            NETWORK,
            "Private key of --tls-cert; none: the key is in the same file.",
            reloadable=True,
        ),
    ] = None
    tls_client_ca: Annotated[
        Path | None,
        Option(
            NETWORK,
            "File of CAs; a client must present a certificate that one of them signed.",
            reloadable=True,
        ),
    ] = None
    instance_api_key: Annotated[
        SecretStr | None,
        Before(secret_text),
        After(sendable),
        Option(
            ACCESS,
            "Key sent to the instances in place of the client's Authorization header.",
            allowed=SECRET_FORM,
            reloadable=True,
        ),
    ] = None
    thermal_token: Annotated[
        SecretStr | None,
        Before(secret_text),
        After(sendable),
        Option(
            ACCESS,
            "Token sent to the plugin vllm-thermal of instances with ;thermal=plugin; none: no "
            "token is sent.",
            allowed=SECRET_FORM,
            reloadable=True,
        ),
    ] = None
    instance_ca: Annotated[
        Path | None,
        Option(
            NETWORK,
            "File of CAs that verify https instances; none: the system's CAs.",
            reloadable=True,
        ),
    ] = None
    instance_cert: Annotated[
        Path | None,
        Option(
            NETWORK,
            "PEM certificate chain for https instances that ask for a client certificate.",
            reloadable=True,
        ),
    ] = None
    instance_key: Annotated[
        Path | None,
        Option(
            NETWORK,
            "Private key of --instance-cert; none: the key is in the same file.",
            reloadable=True,
        ),
    ] = None
    allow_cidr: Annotated[
        Networks | None,
        Before(cidr_list),
        Option(
            ACCESS,
            "Networks in which instances may be added at run time; none: operators add them only "
            "at the addresses of --instances, and --discover finds them anywhere.",
            allowed="networks like 10.0.0.0/8,fd00::/8, or none",
            reloadable=True,
        ),
    ] = None

    instances: Annotated[
        Instances,
        Option(
            FLEET,
            "vLLM servers, comma separated (TOML: an array). With --kv-connector mooncake a "
            "prefill server needs a bootstrap server, given or found; see --bootstrap-port. "
            "Needed where there is no --discover.",
            allowed=INSTANCE_FORM,
            reloadable=True,
        ),
    ] = ()
    discover: Annotated[
        Discoveries,
        Option(
            FLEET,
            "Where instances are looked for as long as the proxy runs, beside --instances: the "
            "addresses of a name, or the pods of a Kubernetes service.",
            allowed=DISCOVER_FORM,
        ),
    ] = ()
    discover_account: Annotated[
        Path,
        Option(
            FLEET,
            "Folder with token and ca.crt for the Kubernetes API of k8s://. Its address is in "
            "KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT.",
        ),
    ] = Path("/var/run/secrets/kubernetes.io/serviceaccount")
    sensor_interval: Annotated[
        float,
        Meta(ge=0.05, le=3600),
        Option(
            FLEET,
            "Time between two reads of an instance's GPU sensors (;dcgm= and others).",
            "s",
            reloadable=True,
        ),
    ] = 5.0
    model: Annotated[
        str | None,
        Meta(pattern=WORD),
        Option(
            FLEET,
            "Name of the served model; none: learned from the instances' /v1/models.",
            reloadable=True,
        ),
    ] = None
    prefill_throughput: Annotated[
        float,
        Meta(ge=0.001, le=1e9),
        Option(
            FLEET,
            "Prefill speed of one instance, assumed until measured prefills correct it.",
            "tokens/s",
        ),
    ] = 20000.0
    max_num_batched_tokens: Annotated[
        Count,
        Option(
            FLEET,
            "The engines' token budget per step: the value of the vLLM flag of that name.",
            "tokens",
        ),
    ] = 8192

    warm_threshold: Annotated[
        Tokens,
        Option(
            DECISIONS,
            "A request with fewer new (uncached) tokens is WARM.",
            "tokens",
            reloadable=True,
        ),
    ] = 1500
    heavy_threshold: Annotated[
        Tokens,
        Option(
            DECISIONS,
            "A request with this many new tokens or more is HEAVY.",
            "tokens",
            reloadable=True,
        ),
    ] = 8192

    placement: Annotated[
        Literal["affinity", "least-tokens", "round-robin"],
        Option(
            DECISIONS,
            "How a policy other than cost chooses the decode instance of a new session.",
            reloadable=True,
        ),
    ] = "affinity"
    session_ttl: Annotated[
        Seconds, Option(CACHES, "An idle session is forgotten after this time.", "s")
    ] = 3600.0
    session_headers: Annotated[
        tuple[str, ...],
        Before(header_list),
        Option(
            CACHES,
            "Request headers that name a session, in order of precedence. They replace the "
            "order in docs/concepts/sessions.md; fields of the body come after them.",
            allowed=HEADERS_FORM,
            reloadable=True,
        ),
    ] = ()
    max_sessions: Annotated[
        Count,
        Option(
            CACHES,
            "Most sessions remembered; with a memory limit one for 16 KiB of it at most. Above "
            "it, the tenant with most sessions loses its longest idle one.",
        ),
    ] = 100_000
    slow_start: Annotated[
        NonNegative,
        Option(
            FLEET,
            "Time in which a recovered instance's share of placements grows from a tenth to all.",
            "s",
        ),
    ] = 30.0
    share: Annotated[
        SecretStr | None,
        Before(secret_text),
        After(bus_url),
        Option(
            FLEET,
            "Redis or Valkey server by which several proxies of one fleet share what they know. "
            "None: this process alone.",
            allowed=BUS_FORM,
        ),
    ] = None
    share_name: Annotated[
        str,
        Meta(pattern=STREAM_NAME),
        Option(
            FLEET,
            "Name of the fleet on the server of --share; proxies of one name share.",
            allowed="letters, digits, . _ -, at most 64",
        ),
    ] = "fleet"
    share_key: Annotated[
        SecretStr | None,
        Before(secret_text),
        After(long_enough),
        Option(
            FLEET,
            "Key that hides names of sessions and hashes of prompts from other readers of that "
            "server; the same for all proxies. At least 16 bytes.",
            allowed=SECRET_FORM,
        ),
    ] = None
    prefix_cache_bytes: Annotated[
        ByteSize,
        Meta(ge=MIB, le=MOST_BYTES),
        Option(
            CACHES,
            "Memory for the prefix index, and as much again for KV events where engines publish "
            "them; each at most an eighth of a memory limit.",
            "bytes",
        ),
    ] = ByteSize(256 * MIB)

    kv_events: Annotated[
        str,
        After(events_text),
        Option(
            CACHES,
            "Endpoint of the engines' KV events (vLLM's --kv-events-config). auto: as the "
            "engine's /kv_event_sources says, which vLLM has from 0.31 on.",
            allowed=EVENTS_FORM,
            reloadable=True,
        ),
    ] = "auto"
    kv_connector: Annotated[
        Literal["mooncake", "nixl", "implicit", "none"],
        Option(
            DECISIONS,
            "KV connector between the engines. implicit: a store that they share; none: no "
            "offload.",
        ),
    ] = "mooncake"
    bootstrap_port: Annotated[
        int | None,
        Meta(ge=1, le=65535),
        Option(
            DECISIONS,
            "Port where an instance without ;bootstrap=, alone on its host, is asked for a "
            "Mooncake bootstrap server; none: not asked.",
            reloadable=True,
        ),
    ] = 8998
    offload_policy: Annotated[
        OffloadPolicy,
        Option(
            DECISIONS,
            "Policy that places requests. cost: the lowest predicted cost of all instances; the "
            "others only decide whether a HEAVY request is offloaded.",
            reloadable=True,
        ),
    ] = "cost"
    shadow_policy: Annotated[
        OffloadPolicy | None,
        Option(
            DECISIONS,
            "Second policy whose decisions are logged and counted but not carried out.",
            reloadable=True,
        ),
    ] = None
    offload_non_cached_tokens: Annotated[
        Tokens,
        Option(
            DECISIONS,
            "Policy threshold: offload a request with at least this many new tokens; 0: never.",
            "tokens",
            reloadable=True,
        ),
    ] = 512
    kv_transfer_time: Annotated[
        NonNegative,
        Option(
            DECISIONS,
            "Time of one KV transfer, assumed until measured transfers correct it; seed-cost "
            "uses it always.",
            "s",
        ),
    ] = 0.5
    ttft_slo: Annotated[
        Seconds,
        Option(
            DECISIONS,
            "TTFT target, plus 0.1 ms per new token; the metrics count the answers that meet it.",
            "s",
            reloadable=True,
        ),
    ] = 2.0
    tpot_slo: Annotated[
        Seconds,
        Option(
            DECISIONS,
            "TPOT target (time per output token); the cost policy aims to meet it for 9 of 10 "
            "answers.",
            "s",
            reloadable=True,
        ),
    ] = 0.05
    kv_pin_timeout: Annotated[
        NonNegative,
        Option(
            CACHES,
            "How long an instance may hold KV that is never fetched "
            "(VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT). It counts as in use for that time.",
            "s",
        ),
    ] = 480.0
    migration_limit: Annotated[
        int,
        Meta(ge=0, le=100),
        Option(
            DECISIONS,
            "How often a started stream may migrate when its instance fails; 0: it ends with an "
            "error.",
            reloadable=True,
        ),
    ] = 0
    migration_max_seq_len: Annotated[
        Count | None,
        Option(
            DECISIONS,
            "A stream with more tokens (prompt and output) does not migrate.",
            "tokens",
            reloadable=True,
        ),
    ] = None
    hedge: Annotated[
        bool,
        Option(
            DECISIONS,
            "Compute the prompt on the decode server too when a prefill leg is late.",
            reloadable=True,
        ),
    ] = True

    active_decode_blocks_threshold: Annotated[
        float | None,
        Meta(ge=0, le=1),
        Option(
            LIMITS,
            "An instance is busy above this share of its KV blocks in use.",
            "ratio",
            reloadable=True,
        ),
    ] = None
    active_prefill_tokens_threshold: Annotated[
        int | None,
        Meta(ge=0, le=MOST),
        Option(
            LIMITS,
            "An instance is busy with more than this many tokens waiting for prefill.",
            "tokens",
            reloadable=True,
        ),
    ] = None
    active_prefill_tokens_threshold_frac: Annotated[
        float | None,
        Meta(ge=0, le=1e9),
        Option(
            LIMITS,
            "The same limit as a multiple of --max-num-batched-tokens.",
            "ratio",
            reloadable=True,
        ),
    ] = None
    overload_status: Annotated[
        Literal[503, 529],
        Before(_number),
        Option(LIMITS, "HTTP status of the answer when every instance is busy.", reloadable=True),
    ] = 503

    late: Annotated[
        Late,
        Option(
            LIMITS,
            "What becomes of a request while every instance is too full for --ttft-slo or "
            "--tpot-slo. serve: it is placed. refuse: it waits for --ttft-slo at most, or is "
            "refused at once where that is predicted to be too short.",
            reloadable=True,
        ),
    ] = "serve"
    max_queue: Annotated[
        int,
        Meta(ge=0, le=MOST),
        Option(
            LIMITS, "Most requests that may wait while every instance is busy; 0: refuse at once."
        ),
    ] = 256
    max_queue_bytes: Annotated[
        ByteSize,
        Meta(ge=0, le=MOST_BYTES),
        Option(
            LIMITS, "Most bytes that the bodies of waiting requests may have together.", "bytes"
        ),
    ] = ByteSize(64 * MIB)
    max_queue_seconds: Annotated[
        Seconds,
        Option(
            LIMITS,
            "Longest wait; a request whose predicted wait is longer is refused at once.",
            "s",
        ),
    ] = 10.0
    tenant_weights: Annotated[
        tuple[TenantWeight, ...],
        Before(weight_list),
        Option(
            LIMITS,
            "Weights of the tenants of --api-key for their turns in the wait queue; a tenant "
            "not named has weight 1.",
            allowed=WEIGHTS_FORM,
        ),
    ] = ()

    max_connections: Annotated[
        int | None,
        Meta(ge=1, le=MOST),
        Option(
            LIMITS,
            "Most client connections; a further one gets a 503. None: 0.45 of the file "
            "descriptors, less 32.",
        ),
    ] = None
    max_memory_bytes: Annotated[
        ByteSize | None,
        Meta(ge=64 * MIB, le=MOST_BYTES),
        Option(
            LIMITS,
            "Memory limit. Near it the proxy refuses keep-alive first, then HEAVY requests, "
            "then all requests. None: the cgroup's limit.",
            "bytes",
        ),
    ] = None

    connect_timeout: Annotated[
        Seconds, Option(TIMEOUTS, "Longest time for a TCP connect to an instance.", "s")
    ] = 2.0
    prefill_timeout: Annotated[
        Seconds,
        Option(
            TIMEOUTS,
            "Longest time for the prefill leg of an offload; then the request is colocated. The "
            "limit is 2 s + 3 x the prefill's late bound if that is shorter.",
            "s",
            reloadable=True,
        ),
    ] = 120.0
    transfer_timeout: Annotated[
        Seconds,
        Option(
            TIMEOUTS,
            "Longest time from the end of the prefill leg to the decode server's first byte; "
            "then the request is colocated. The limit is 2 s + 3 x (queue + late bound of the "
            "transfer) if that is shorter.",
            "s",
            reloadable=True,
        ),
    ] = 30.0
    ttft_timeout: Annotated[
        Seconds,
        Option(
            TIMEOUTS,
            "Longest time from a stream's dispatch to its first byte. The limit is 5 s + 3 x "
            "the prefill's late bound if that is shorter and another instance can take the "
            "request.",
            "s",
            reloadable=True,
        ),
    ] = 300.0
    answer_timeout: Annotated[
        Seconds | None,
        Option(
            TIMEOUTS,
            "Longest time from dispatch to an answer that does not stream, whose first byte "
            "comes with the last. The request is not tried again after it. None: only "
            "--total-timeout limits it.",
            "s",
            reloadable=True,
        ),
    ] = None
    idle_timeout: Annotated[
        Seconds,
        Option(
            TIMEOUTS,
            "Longest silence between two pieces of an answer. For a stream the limit is 60 s + "
            "200 decode steps + the instance's prefill queue if that is shorter.",
            "s",
            reloadable=True,
        ),
    ] = 300.0
    heartbeat_interval: Annotated[
        NonNegative,
        Option(
            TIMEOUTS,
            "Silence after which a started stream gets an event without effect: a ping, an "
            "empty chunk, or a comment for an unknown API; 0: never.",
            "s",
        ),
    ] = 15.0
    total_timeout: Annotated[
        Seconds,
        Option(
            TIMEOUTS,
            "Longest time for one request from its start to its end.",
            "s",
            reloadable=True,
        ),
    ] = 3600.0

    scrape_interval: Annotated[
        Seconds, Option(FLEET, "Time between two reads of an instance's /metrics.", "s")
    ] = 2.0
    health_interval: Annotated[
        Seconds,
        Option(
            FLEET, "Time between two health checks of an instance, varied by up to a fifth.", "s"
        ),
    ] = 1.0
    health_timeout: Annotated[
        Seconds,
        Option(
            FLEET,
            "A health check that takes longer has failed, unless the instance answers requests "
            "meanwhile.",
            "s",
            reloadable=True,
        ),
    ] = 1.0

    request_log: Annotated[
        Path | None,
        Option(TELEMETRY, "File that gets one JSON object per finished request; -: stdout."),
    ] = None
    access_log: Annotated[
        Literal["off", "text", "json"],
        Option(TELEMETRY, "Form of the access log: one short line per finished request."),
    ] = "off"
    access_log_file: Annotated[
        Path | None, Option(TELEMETRY, "File of the access log; none: stdout.")
    ] = None
    log_candidates: Annotated[
        int,
        Meta(ge=0, le=MOST_KEPT),
        Option(
            TELEMETRY,
            "Most alternatives of a decision in a line of the request log: the cheapest ones, "
            "and the one taken.",
            reloadable=True,
        ),
    ] = MOST_KEPT
    samples: Annotated[
        int,
        Meta(ge=0, le=100_000),
        Option(
            TELEMETRY,
            "Last ended requests kept in plain numbers for GET /samples, some 400 bytes each; "
            "0: none.",
        ),
    ] = 0
    otlp_endpoint: Annotated[
        str | None,
        Meta(pattern=OTLP_URL),
        Option(
            TELEMETRY,
            "Collector that gets a trace of each request, by OTLP over HTTP; /v1/traces is added "
            "to an address without a path. Needs the extra otel. None: traceparent is passed on.",
            allowed="http(s)://HOST:PORT, with a path or without, and no user",
        ),
    ] = None
    trace_ratio: Annotated[
        float,
        Meta(ge=0, le=1),
        Option(
            TELEMETRY,
            "Part of the requests that are traced, of those that come without a traceparent; "
            "others are traced if it says so.",
            "ratio",
            reloadable=True,
        ),
    ] = 1.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Option(TELEMETRY, "Lowest severity that is logged."),
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"], Option(TELEMETRY, "Format of the log on stderr.")
    ] = "text"

    def check(self) -> None:
        """Raise OptionError if values contradict each other."""
        if not (self.instances or self.discover):
            raise OptionError("instances", "none is given, and there is no --discover")
        if self.warm_threshold > self.heavy_threshold:
            raise _pair("warm_threshold", "must not be larger than", "heavy_threshold")
        for name, other in NEEDS:
            if getattr(self, name) not in (None, ()) and getattr(self, other) is None:
                raise _pair(name, "has no effect with", other)
        is_open = self.admin_port is not None and self.admin_token is None
        if is_open and not is_loopback(self.admin_host):
            raise _pair("admin_host", "must be a loopback address with", "admin_token")
        self._check_logs()
        self._check_heat()
        if self.workers > 1:
            self._check_workers()
        own = next((spec for spec in self.instances if self._is_own_address(spec)), None)
        if own is not None:
            raise OptionError("instances", f"{own.name!r} is where this proxy listens (--port)")

    def _check_logs(self) -> None:
        """Raise OptionError if two logs share a file: they would cut each other's lines."""
        if self.access_log == "off":
            if self.access_log_file is not None:
                raise _pair("access_log_file", "has no effect with", "access_log")
        elif self.request_log is not None and self.request_log == self.access_log_at:
            raise _pair("access_log_file", "is the same file as", "request_log")

    def _check_workers(self) -> None:
        """Raise OptionError if several processes would know nothing of each other, or collide."""
        if self.share is None:
            raise _pair("workers", "needs that proxies share what they know, but", "share")
        if self.admin_port and self.admin_port <= self.port < self.admin_port + self.workers:
            raise _pair("admin_port", "plus the number of a worker is", "port")
        for name in ("request_log", "access_log_file"):
            path = getattr(self, name)
            if path is not None and WORKER not in str(path):
                raise _pair(name, f"needs {WORKER} in its path, a file for each of", "workers")

    @property
    def access_log_at(self) -> Path | None:
        """Target of the access log: a file, `-` for stdout; None: off."""
        return None if self.access_log == "off" else self.access_log_file or Path("-")

    def _check_heat(self) -> None:
        """Raise OptionError if options of thermal control lack the options that they need."""
        if self.enable_admin_api and self.admin_port is None:
            raise _pair("enable_admin_api", "has no effect with", "admin_port")
        if self.enable_admin_api and not (self.admin_token or self.tls_client_ca):
            raise _pair(
                "enable_admin_api",
                "needs a token or client certificates:",
                "admin_token",
            )
        if self.thermal_may_abort and not self.limits_heat:
            raise _pair("thermal_may_abort", "has no effect with", "thermal")
        for spec in self.instances:
            try:
                self.check_instance(spec)
            except ValueError as error:
                raise OptionError("instances", str(error)) from error

    def check_instance(self, spec: InstanceSpec) -> None:
        """Raise ValueError if an instance's entry has no effect with these options."""
        if spec.thermal is not None and not self.limits_heat:
            of_no_use = "has no effect without --thermal or --enable-admin-api"
            raise ValueError(f"{spec.name!r}: ;thermal={spec.thermal} {of_no_use}")

    @property
    def limits_heat(self) -> bool:
        """Whether instances may be limited for their heat: by an operator, or by control."""
        return self.enable_admin_api or self.thermal is not None

    def _is_own_address(self, spec: InstanceSpec) -> bool:
        """Whether an instance would be the proxy's own listener."""
        host, _, port = spec.url.partition("://")[2].rpartition(":")
        ways_in = {self.host.lower(), *(LOOPBACK if self.host in EVERY_ADDRESS else ())}
        return int(port) == self.port and host.strip("[]") in ways_in


def _pair(name: str, what: str, other: str) -> OptionError:
    return OptionError(name, what, (name, other))
