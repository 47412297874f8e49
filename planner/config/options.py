"""Every option of the planner, declared once: flag, key of the configuration, range and help.

The keys are those of Dynamo's PlannerConfig where it has one of this meaning. Times are seconds
unless a name says `_ms`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from msgspec import Meta

from planner.config.plugins import MOST_PLUGINS, PluginSpec, plugins_of, tables_of
from planner.core.perf.capacity import Slo
from planner.core.predict import PREDICTORS
from planner.core.propose.static import DECODE, Aim, Thresholds
from planner.core.rules import DownRule, Rules, Strategy
from proxy.config.model import After, Before, Model, OptionError
from proxy.config.secrets import SecretStr, is_loopback, long_enough, secret_text, sendable
from proxy.config.sources import Option

FLEET, TARGETS, LOOPS, PREDICTION = "Fleet", "Targets and limits", "Loops", "Prediction"
PLUGINS, CARRYING, WATCHING = "Plugins", "Carrying out", "Watching"
Count = Annotated[int, Meta(ge=1, le=10**6)]
Seconds = Annotated[float, Meta(gt=0, le=1e6)]
Word = Annotated[str, Meta(pattern=r"^\S+$")]
SECRET_FORM = "text, never shown, or @FILE that holds it, or none"
MOST_PROXIES = 16
STARTED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._:-]{0,40})?\*[A-Za-z0-9._:-]{0,16}")
"""Globs of which names can be made: with a number for the star they match, and proxies take them.
"""


def _urls(value: object) -> object:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        raise ValueError("a list of addresses")
    urls = tuple(_url(str(part).strip()) for part in parts)
    if len(urls) > MOST_PROXIES:
        raise ValueError(f"at most {MOST_PROXIES}")
    if len(set(urls)) < len(urls):
        raise ValueError("an address is given twice: all of its requests would count twice")
    return urls


def _url(text: str) -> str:
    if not text or any(c.isspace() for c in text):
        raise ValueError("an address is empty, or has spaces")
    url = (text if "://" in text else f"http://{text}").rstrip("/")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise ValueError("an address is not of the form [http://]host:port")
    return url


def _one_url(value: str | None) -> None:
    if value is not None and not value.startswith(("http://", "https://")):
        raise ValueError("its scheme is http or https")


def _words(value: object) -> object:
    return tuple(value.split()) if isinstance(value, str) else tuple(map(str, value))  # type: ignore[call-overload]


class PlannerOptions(Model):
    """Scale a fleet of vLLM instances behind cache-proxy, before users notice."""

    topics: ClassVar[tuple[str, ...]] = (
        *(FLEET, TARGETS, LOOPS, PREDICTION, PLUGINS, CARRYING, WATCHING),
    )

    proxies: Annotated[
        tuple[str, ...],
        Before(_urls),
        Meta(min_length=1),
        Option(
            FLEET,
            "Admin addresses of all proxies in front of the fleet.",
            allowed=f"[http://]host:port, comma separated, 1 to {MOST_PROXIES}",
        ),
    ]
    proxy_token: Annotated[
        SecretStr | None,
        Before(secret_text),
        After(sendable),
        Option(FLEET, "The proxies' --admin-token.", allowed=SECRET_FORM),
    ] = None
    proxy_ca: Annotated[
        Path | None,
        Option(FLEET, "File of CAs that verify https proxies; none: the system's CAs."),
    ] = None
    proxy_cert: Annotated[
        Path | None,
        Option(FLEET, "PEM certificate chain for https proxies that ask for a client certificate."),
    ] = None
    proxy_key: Annotated[
        Path | None,
        Option(FLEET, "Private key of --proxy-cert; none: the key is in the same file."),
    ] = None
    instance_ca: Annotated[
        Path | None,
        Option(FLEET, "File of CAs that verify https engines; none: the system's CAs."),
    ] = None
    instance_cert: Annotated[
        Path | None,
        Option(FLEET, "PEM certificate chain for https engines that ask for a client certificate."),
    ] = None
    instance_key: Annotated[
        Path | None,
        Option(FLEET, "Private key of --instance-cert; none: the key is in the same file."),
    ] = None
    throughput_metrics_source: Annotated[
        Literal["proxy", "prometheus", "frontend", "router"],
        Option(
            FLEET,
            "Where counters of the traffic are read; frontend and router are other names of proxy.",
        ),
    ] = "proxy"
    prometheus: Annotated[
        str | None,
        After(_one_url),
        Option(
            FLEET,
            "Address of the Prometheus that scrapes all proxies, for the source prometheus.",
            allowed="http(s)://host:port, or none",
        ),
    ] = None
    prometheus_token: Annotated[
        SecretStr | None,
        Before(secret_text),
        After(sendable),
        Option(FLEET, "Token that it is asked with.", allowed=SECRET_FORM),
    ] = None
    prometheus_ca: Annotated[
        Path | None,
        Option(FLEET, "File of CAs that verify an https Prometheus; none: the system's CAs."),
    ] = None
    match: Annotated[
        Word, Option(FLEET, "Glob over the names of the instances that are scaled.")
    ] = "*"
    gpus_per_replica: Annotated[Count, Option(FLEET, "GPUs of one instance.")] = 1
    max_num_seqs: Annotated[Count, Option(FLEET, "The engines' --max-num-seqs.")] = 256
    max_num_batched_tokens: Annotated[
        Count, Option(FLEET, "The engines' --max-num-batched-tokens.")
    ] = 8192
    mode: Annotated[
        Literal["agg"],
        Option(FLEET, "Each instance prefills and decodes; the proxy does not send by kind."),
    ] = "agg"

    ttft_ms: Annotated[
        Annotated[float, Meta(gt=0, le=1e7)], Option(TARGETS, "Target of the first token.", "ms")
    ] = 500.0
    itl_ms: Annotated[
        Annotated[float, Meta(gt=0, le=1e6)],
        Option(TARGETS, "Target of the time between two tokens of a stream.", "ms"),
    ] = 50.0
    optimization_target: Annotated[
        Literal["sla", "throughput", "latency", "load"],
        Option(
            TARGETS,
            "sla: the targets above, by a model of the engines. Others: a share of the KV cache "
            "in use, without a model, a prediction or a target.",
        ),
    ] = "sla"
    decode_scale_up_kv_rate: Annotated[
        Annotated[float, Meta(ge=0, le=1000)] | None,
        Option(TARGETS, "Target load: one more where an instance uses so much of its KV.", "%"),
    ] = None
    decode_scale_down_kv_rate: Annotated[
        Annotated[float, Meta(ge=0, le=1000)] | None,
        Option(TARGETS, "Target load: one fewer where none uses more than that.", "%"),
    ] = None
    min_endpoint: Annotated[
        Annotated[int, Meta(ge=1, le=10**5)], Option(TARGETS, "Fewest instances.")
    ] = 1
    max_gpu_budget: Annotated[
        Annotated[int, Meta(ge=-1, le=10**6)],
        Option(TARGETS, "Most GPUs of all instances; -1: no limit."),
    ] = 8
    max_throughput_scaling_replicas: Annotated[
        Count, Option(TARGETS, "Most instances by which throughput scaling changes at once.")
    ] = 8

    strategy: Annotated[
        Literal["reserve", "founding"],
        Option(
            LOOPS,
            "reserve: replicas for the offered work, and for how wrong its forecasts have been. "
            "founding: the two loops of Dynamo's planner, which the rest of this topic is about.",
        ),
    ] = "reserve"
    enable_throughput_scaling: Annotated[bool, Option(LOOPS, "Follow the predicted load.")] = True
    enable_load_scaling: Annotated[bool, Option(LOOPS, "Follow what instances have now.")] = True
    throughput_adjustment_interval_seconds: Annotated[
        Seconds, Option(LOOPS, "Time between two predictions, and the window of traffic.", "s")
    ] = 180.0
    load_adjustment_interval_seconds: Annotated[
        Seconds, Option(LOOPS, "Time between two looks at the instances.", "s")
    ] = 5.0
    tick_max_duration_seconds: Annotated[
        Seconds, Option(LOOPS, "A tick that takes longer changes nothing.", "s")
    ] = 30.0
    load_min_observations: Annotated[
        Count, Option(LOOPS, "Observed iterations before the model of the engines is used.")
    ] = 5
    load_scaling_down_sensitivity: Annotated[
        Annotated[float, Meta(ge=0, le=100)],
        Option(LOOPS, "Share of the targets below which an instance is taken away.", "%"),
    ] = 80.0
    scale_down_rule: Annotated[
        Literal["consolidation", "sensitivity"],
        Option(
            LOOPS,
            "Whether the others could take over is asked, or, as the founding design has it, "
            "only whether all have room now; that one may go down and up for ever.",
        ),
    ] = "consolidation"

    load_predictor: Annotated[
        Literal["constant", "kalman", "holt", "seasonal", "ensemble", "arima"],
        Option(
            PREDICTION,
            "The predictor. ensemble: the one of those before it that has cost least. arima: by "
            "statsmodels in a process of its own, which is in the extra planner.",
        ),
    ] = "kalman"
    load_predictor_log1p: Annotated[
        bool, Option(PREDICTION, "Predict the logarithm: growth by a factor is a line then.")
    ] = False
    load_predictor_warmup_trace: Annotated[
        Word | None,
        Option(
            PREDICTION,
            "Trace, folder or glob of traces that the predictor learns from before it begins; "
            "request traces of Dynamo, too.",
            allowed="path without spaces, or none",
        ),
    ] = None
    profile_results_dir: Annotated[
        Path | None,
        Option(
            PREDICTION,
            "Folder of a profile, as `cache-planner profile` or Dynamo's profiler writes it: "
            "what an iteration takes, until enough are observed.",
        ),
    ] = None
    speculative_nextn: Annotated[
        Annotated[int, Meta(ge=0, le=64)],
        Option(PREDICTION, "Tokens that the engines draft per step; 0: none."),
    ] = 0

    plugin: Annotated[
        tuple[Mapping[str, Any], ...],
        Before(tables_of),
        Option(
            PLUGINS,
            "Plugins of other processes, which are asked by gRPC; see above.",
            allowed=f"tables [[plugin]] of a file, or JSON; at most {MOST_PLUGINS}",
        ),
    ] = ()
    plugin_registration: Annotated[
        bool, Option(PLUGINS, "Plugins may register themselves at the planner's listener.")
    ] = False

    advisory: Annotated[
        bool, Option(CARRYING, "Decide, publish figures and log, and carry out nothing.")
    ] = True
    scaler: Annotated[
        Literal["noop", "file", "exec", "virtual", "kubernetes"],
        Option(CARRYING, "What carries decisions out."),
    ] = "noop"
    scaler_command: Annotated[
        tuple[str, ...],
        Before(_words),
        Option(
            CARRYING,
            "Command of the scaler exec; it is called with list, start NAME, stop NAME.",
            allowed="words, separated by spaces",
        ),
    ] = ()
    decision_file: Annotated[
        Path | None, Option(CARRYING, "File of the scaler file, with the last decision as JSON.")
    ] = None
    kubernetes_object: Annotated[
        Word | None,
        Option(
            CARRYING,
            "Object of the scaler kubernetes; none: the graph deployment that the environment "
            "variable DYN_PARENT_DGD_K8S_NAME names.",
            allowed="KIND/NAME or GROUP/VERSION/PLURAL/NAME, or none",
        ),
    ] = None
    kubernetes_namespace: Annotated[
        Word | None, Option(CARRYING, "Where it is; none: the planner's own, else default.")
    ] = None
    kubernetes_kubeconfig: Annotated[
        Path | None, Option(CARRYING, "File with the cluster's address; none: that of the pod.")
    ] = None
    kubernetes_port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)],
        Option(
            CARRYING,
            "Port of the pods, by which the proxies are told of new ones; 0: they find them.",
        ),
    ] = 0
    scaling_max_wait_seconds: Annotated[
        Seconds, Option(CARRYING, "What has not come or gone by then counts as absent.", "s")
    ] = 1800.0
    state_file: Annotated[
        Path, Option(CARRYING, "What a successor goes on with; locked while a planner runs.")
    ] = Path("cache-planner.state.json")

    control: Annotated[
        Word, Option(WATCHING, "Address of the planner's own listener; port 0: the kernel chooses.")
    ] = "127.0.0.1:9180"
    control_token: Annotated[
        SecretStr | None,
        Before(secret_text),
        After(sendable),
        After(long_enough),
        Option(
            WATCHING,
            "Token that requests must send as Authorization: Bearer; needed beyond loopback.",
            allowed=SECRET_FORM,
        ),
    ] = None
    audit_log: Annotated[
        Path | None, Option(WATCHING, "File with a line of JSON per decision, its inputs and why.")
    ] = None
    report_file: Annotated[
        Path | None,
        Option(WATCHING, "Report as HTML, written at the end and every report_interval_hours."),
    ] = None
    report_interval_hours: Annotated[
        Annotated[float, Meta(gt=0, le=1e4)], Option(WATCHING, "Time between two reports.", "h")
    ] = 24.0

    def check(self) -> None:
        """Options that contradict each other."""
        self._check_loops()
        gpus = self.min_endpoint * self.gpus_per_replica
        if 0 <= self.max_gpu_budget < gpus or self.max_gpu_budget == 0:
            raise OptionError(
                "max_gpu_budget", f"min_endpoint and gpus_per_replica need {gpus} at least"
            )
        if self.throughput_metrics_source == "prometheus" and self.prometheus is None:
            raise OptionError("prometheus", "the source prometheus needs it")
        self._check_pairs()
        if self.scaler == "exec" and not STARTED.fullmatch(self.match):
            raise OptionError(
                "match",
                "the scaler exec makes names of it: one *, and letters, digits, . _ : - beside it",
            )
        host, port = self.control_address
        if not is_loopback(host) and self.control_token is None:
            raise OptionError("control_token", f"{host}:{port} is not loopback, so it is needed")
        _ = self.plugins

    @property
    def plugins(self) -> list[PluginSpec]:
        """Those of the option `plugin`. Raises OptionError."""
        return plugins_of(self.plugin, self.tick_max_duration_seconds)

    @property
    def aim(self) -> Aim:
        """What load scaling keeps."""
        return Aim(self.optimization_target)

    @property
    def thresholds(self) -> Thresholds | None:
        """Those of the target load. Raises OptionError where they are not given."""
        up, down = self.decode_scale_up_kv_rate, self.decode_scale_down_kv_rate
        if self.aim is not Aim.LOAD:
            return None
        for name in ("decode_scale_up_kv_rate", "decode_scale_down_kv_rate"):
            if getattr(self, name) is None:
                raise OptionError(name, "the target load needs it")
        assert up is not None
        assert down is not None
        if down >= up:
            raise OptionError("decode_scale_down_kv_rate", "it has to be below the one for up")
        return Thresholds(up / 100, down / 100, is_closed=True)

    def _check_pairs(self) -> None:
        """Options that are nothing without another one."""
        for scaler, needed in (("exec", "scaler_command"), ("file", "decision_file")):
            if self.scaler == scaler and not getattr(self, needed):
                raise OptionError(needed, f"the scaler {scaler} needs it")
        for kind in ("proxy", "instance"):
            if getattr(self, f"{kind}_key") and not getattr(self, f"{kind}_cert"):
                raise OptionError(f"{kind}_key", f"it has no effect without {kind}_cert")

    def _check_loops(self) -> None:
        if self.aim is not Aim.SLA:
            self._check_aim()
            return
        if not (self.enable_throughput_scaling or self.enable_load_scaling):
            raise OptionError("enable_load_scaling", "one of the two loops has to be on")
        slow = round(1000 * self.throughput_adjustment_interval_seconds)
        fast = max(1, round(1000 * self.load_adjustment_interval_seconds))
        if self.enable_throughput_scaling and self.enable_load_scaling and slow % fast:
            raise OptionError(
                "load_adjustment_interval_seconds",
                "it has to divide throughput_adjustment_interval_seconds",
            )

    def _check_aim(self) -> None:
        """A target of use is load scaling alone."""
        if not self.enable_load_scaling:
            raise OptionError("enable_load_scaling", f"{self.aim} is load scaling alone")
        _ = self.thresholds

    @property
    def control_address(self) -> tuple[str, int]:
        """Host and port of the listener. Raises OptionError."""
        host, _, port = self.control.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise OptionError("control", "it is not of the form HOST:PORT")
        return host.strip("[]"), int(port)

    @property
    def rules(self) -> Rules:
        """What the builtin plugins go by."""
        return Rules(
            Slo(self.ttft_ms / 1000, self.itl_ms / 1000),
            Strategy(self.strategy) if self.aim is Aim.SLA else Strategy.FOUNDING,
            aim=self.aim,
            own=self.thresholds or DECODE[Aim.THROUGHPUT],
            throughput_scaling=self.enable_throughput_scaling and self.aim is Aim.SLA,
            load_scaling=self.enable_load_scaling,
            throughput_interval_s=self.throughput_adjustment_interval_seconds,
            load_interval_s=self.load_adjustment_interval_seconds,
            # What a child process predicts is told to the core; this is for where it does not.
            predictor=self.load_predictor if self.load_predictor in PREDICTORS else "constant",
            predictor_log=self.load_predictor_log1p,
            sensitivity=self.load_scaling_down_sensitivity / 100,
            down_rule=DownRule(self.scale_down_rule),
            max_step=self.max_throughput_scaling_replicas,
            min_endpoint=self.min_endpoint,
            min_observations=self.load_min_observations,
            most_accept_length=1.0 + self.speculative_nextn,
        )
