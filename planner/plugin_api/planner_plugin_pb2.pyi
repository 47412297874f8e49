from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Stage(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STAGE_UNSPECIFIED: _ClassVar[Stage]
    PREDICT: _ClassVar[Stage]
    PROPOSE: _ClassVar[Stage]
    RECONCILE: _ClassVar[Stage]
    CONSTRAIN: _ClassVar[Stage]

class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KIND_UNSPECIFIED: _ClassVar[Kind]
    SET: _ClassVar[Kind]
    AT_LEAST: _ClassVar[Kind]
    AT_MOST: _ClassVar[Kind]
    REJECT: _ClassVar[Kind]
STAGE_UNSPECIFIED: Stage
PREDICT: Stage
PROPOSE: Stage
RECONCILE: Stage
CONSTRAIN: Stage
KIND_UNSPECIFIED: Kind
SET: Kind
AT_LEAST: Kind
AT_MOST: Kind
REJECT: Kind

class DescribeRequest(_message.Message):
    __slots__ = ("protocol",)
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    def __init__(self, protocol: _Optional[int] = ...) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("protocol",)
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    def __init__(self, protocol: _Optional[int] = ...) -> None: ...

class EvaluateRequest(_message.Message):
    __slots__ = ("protocol", "stage", "context")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    stage: Stage
    context: Context
    def __init__(self, protocol: _Optional[int] = ..., stage: _Optional[_Union[Stage, str]] = ..., context: _Optional[_Union[Context, _Mapping]] = ...) -> None: ...

class Context(_message.Message):
    __slots__ = ("tick", "now_s", "components", "traffic", "recent", "prediction")
    TICK_FIELD_NUMBER: _ClassVar[int]
    NOW_S_FIELD_NUMBER: _ClassVar[int]
    COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_FIELD_NUMBER: _ClassVar[int]
    RECENT_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    tick: int
    now_s: float
    components: _containers.RepeatedCompositeFieldContainer[Component]
    traffic: Traffic
    recent: Traffic
    prediction: Prediction
    def __init__(self, tick: _Optional[int] = ..., now_s: _Optional[float] = ..., components: _Optional[_Iterable[_Union[Component, _Mapping]]] = ..., traffic: _Optional[_Union[Traffic, _Mapping]] = ..., recent: _Optional[_Union[Traffic, _Mapping]] = ..., prediction: _Optional[_Union[Prediction, _Mapping]] = ...) -> None: ...

class Component(_message.Message):
    __slots__ = ("name", "ready", "expected", "pending", "baseline", "gpus", "step_tokens", "max_seqs", "kv_tokens", "engines")
    NAME_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    BASELINE_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQS_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    name: str
    ready: int
    expected: int
    pending: int
    baseline: int
    gpus: int
    step_tokens: int
    max_seqs: int
    kv_tokens: int
    engines: _containers.RepeatedCompositeFieldContainer[Engine]
    def __init__(self, name: _Optional[str] = ..., ready: _Optional[int] = ..., expected: _Optional[int] = ..., pending: _Optional[int] = ..., baseline: _Optional[int] = ..., gpus: _Optional[int] = ..., step_tokens: _Optional[int] = ..., max_seqs: _Optional[int] = ..., kv_tokens: _Optional[int] = ..., engines: _Optional[_Iterable[_Union[Engine, _Mapping]]] = ...) -> None: ...

class Engine(_message.Message):
    __slots__ = ("name", "wall_s", "prefill_tokens", "decode_requests", "decode_kv_tokens", "queued_prefill_tokens", "queued_decode_kv_tokens")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WALL_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    DECODE_KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_DECODE_KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    name: str
    wall_s: float
    prefill_tokens: float
    decode_requests: float
    decode_kv_tokens: float
    queued_prefill_tokens: float
    queued_decode_kv_tokens: float
    def __init__(self, name: _Optional[str] = ..., wall_s: _Optional[float] = ..., prefill_tokens: _Optional[float] = ..., decode_requests: _Optional[float] = ..., decode_kv_tokens: _Optional[float] = ..., queued_prefill_tokens: _Optional[float] = ..., queued_decode_kv_tokens: _Optional[float] = ...) -> None: ...

class Traffic(_message.Message):
    __slots__ = ("window_s", "requests", "isl_tokens", "osl_tokens", "hit_ratio", "accept_length", "ttft_s", "itl_s", "ended")
    WINDOW_S_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ISL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OSL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_RATIO_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    ITL_S_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    window_s: float
    requests: float
    isl_tokens: float
    osl_tokens: float
    hit_ratio: float
    accept_length: float
    ttft_s: float
    itl_s: float
    ended: float
    def __init__(self, window_s: _Optional[float] = ..., requests: _Optional[float] = ..., isl_tokens: _Optional[float] = ..., osl_tokens: _Optional[float] = ..., hit_ratio: _Optional[float] = ..., accept_length: _Optional[float] = ..., ttft_s: _Optional[float] = ..., itl_s: _Optional[float] = ..., ended: _Optional[float] = ...) -> None: ...

class Prediction(_message.Message):
    __slots__ = ("next_num_req", "next_isl", "next_osl", "hit_ratio", "accept_length")
    NEXT_NUM_REQ_FIELD_NUMBER: _ClassVar[int]
    NEXT_ISL_FIELD_NUMBER: _ClassVar[int]
    NEXT_OSL_FIELD_NUMBER: _ClassVar[int]
    HIT_RATIO_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    next_num_req: float
    next_isl: float
    next_osl: float
    hit_ratio: float
    accept_length: float
    def __init__(self, next_num_req: _Optional[float] = ..., next_isl: _Optional[float] = ..., next_osl: _Optional[float] = ..., hit_ratio: _Optional[float] = ..., accept_length: _Optional[float] = ...) -> None: ...

class Target(_message.Message):
    __slots__ = ("component", "kind", "replicas")
    COMPONENT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    component: str
    kind: Kind
    replicas: int
    def __init__(self, component: _Optional[str] = ..., kind: _Optional[_Union[Kind, str]] = ..., replicas: _Optional[int] = ...) -> None: ...

class EvaluateResponse(_message.Message):
    __slots__ = ("targets", "is_final", "reason", "prediction")
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    IS_FINAL_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    targets: _containers.RepeatedCompositeFieldContainer[Target]
    is_final: bool
    reason: str
    prediction: Prediction
    def __init__(self, targets: _Optional[_Iterable[_Union[Target, _Mapping]]] = ..., is_final: _Optional[bool] = ..., reason: _Optional[str] = ..., prediction: _Optional[_Union[Prediction, _Mapping]] = ...) -> None: ...
