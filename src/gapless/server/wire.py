"""Messages between the engine's process and the front end: msgpack with a schema, never pickle.

A frame is four bytes of length, little-endian, and that many bytes of msgpack. The dataclasses of the engine
(`Request`, `StepMessage`) travel as they are, field by field, so that a new field needs no change here; an array is
its dtype, its shape and its bytes. Either side decodes into its own types and refuses whatever does not fit them.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any, TypeAlias, get_type_hints

import msgspec
import numpy as np

from gapless.engine.stats import EngineStats
from gapless.errors import RequestError
from gapless.request.messages import StepMessage
from gapless.request.outputs import FinishReason
from gapless.request.request import LoraRef, Request
from gapless.request.sampling_params import SamplingParams
from gapless.scheduler.stats import SchedulerStats
from gapless.server.estimates import ModelSizes

HEADER = 4
MAX_FRAME = 1 << 30
"""No message is longer: a longer length means that the two sides are out of step."""
_DTYPES = frozenset(("<i4", "<i8", "<f4", "|b1", "|u1", "<u4"))


class WireError(ValueError):
    """The other side sent what is not a message."""


# ---- requests -----------------------------------------------------------------------------------------------------


def _plain_request() -> Any:
    """`Request` with its parameters as plain data, which `SamplingParams` itself reads."""
    hints = {**get_type_hints(Request), "params": dict[str, Any]}
    found: list[Any] = []
    for field in fields(Request):
        if field.default is not MISSING:
            found.append((field.name, hints[field.name], field.default))
        elif field.default_factory is not MISSING:
            found.append((field.name, hints[field.name], msgspec.field(default_factory=field.default_factory)))
        else:
            found.append((field.name, hints[field.name]))
    return msgspec.defstruct("_PlainRequest", found)


_PlainRequest = _plain_request()
_NAMES = tuple(field.name for field in fields(Request))


def _request(plain: Any) -> Request:
    values = {name: getattr(plain, name) for name in _NAMES}
    values["params"] = SamplingParams(**values["params"])
    return Request(**values)


# ---- to the engine ------------------------------------------------------------------------------------------------


class Setup(msgspec.Struct, tag="setup", array_like=True):
    """The first message: what to load.

    Attributes:
        options: of `EngineConfig.from_dict`.
        tokenizer: folder or name of the one whose tokens grammars are about, if it is not the model's.
        log_level: of the module ``logging``.
        adapters: LoRA adapters to load, folders by name.
        heartbeat: seconds after which the engine's process says that it lives when it has nothing to report.
    """

    model: str
    options: dict[str, Any]
    tokenizer: str | None = None
    log_level: int = 20
    log_json: bool = False
    adapters: dict[str, str] = {}
    heartbeat: float = 1.0


class Commands(msgspec.Struct, tag="commands", array_like=True):
    """What one turn of the front end's event loop has for the engine. Requests come before the ends."""

    requests: list[_PlainRequest]  # type: ignore[valid-type]
    finish: list[tuple[int, FinishReason]]

    @classmethod
    def of(cls, requests: list[msgspec.Raw], finish: list[tuple[int, FinishReason]]) -> Commands:
        """To be sent: requests as `encode_request` has written them."""
        return cls(requests, finish)

    def read(self) -> tuple[list[Request], list[Refused]]:
        """What was received, as requests, and those whose parameters `SamplingParams` does not allow after all."""
        requests, refused = list[Request](), list[Refused]()
        for plain in self.requests:
            try:
                requests.append(_request(plain))
            except RequestError as error:
                refused.append(Refused(plain.id, str(error)))  # type: ignore[attr-defined]
        return requests, refused


class Act(msgspec.Struct, tag="act", array_like=True):
    """Do what `gapless.server.actions.perform` says, and answer with `Acted` of the same number."""

    number: int
    action: str
    argument: str = ""


class Stop(msgspec.Struct, tag="stop", array_like=True):
    """End after the steps in flight."""


ToEngine: TypeAlias = Setup | Commands | Act | Stop

# ---- to the front end ---------------------------------------------------------------------------------------------


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """The engine is loaded, warm, and waits for requests.

    Attributes:
        model_name: for logs.
        options: of `EngineConfig`, with what was left open filled in.
        adapters: that are loaded.
        longest: tokens, prompt and output, of the longest request that can be served.
        sizes: of the model, for estimates.
        sampling_defaults: fields of `SamplingParams` where a request gives nothing.
    """

    model_name: str
    options: dict[str, Any]
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    longest: int
    device: str
    dtype: str
    adapters: list[LoraRef] = []
    sizes: ModelSizes | None = None
    sampling_defaults: dict[str, float] = {}


class Step(msgspec.Struct, tag="step", array_like=True):
    """What one step brought, and the counters after it; without a message it is a sign of life."""

    message: StepMessage | None
    engine: EngineStats
    scheduler: SchedulerStats


class Refused(msgspec.Struct, tag="refused", array_like=True):
    """A request that the engine never took, and why."""

    id: int
    message: str


class Acted(msgspec.Struct, tag="acted", array_like=True):
    """An `Act` is done, or was refused for this reason."""

    number: int
    error: str | None = None


class Died(msgspec.Struct, tag="died", array_like=True):
    """The last message of an engine that ended by an error.

    Attributes:
        usage: the options or the model were wrong; trying again is of no use.
    """

    reason: str
    usage: bool = False


ToFrontEnd: TypeAlias = Ready | Step | Refused | Acted | Died

# ---- codec --------------------------------------------------------------------------------------------------------


def _to_plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype.str not in _DTYPES:
            raise TypeError(f"an array of {value.dtype} does not travel")
        return value.dtype.str, value.shape, value.tobytes()
    raise TypeError(f"an object of type {type(value).__name__} does not travel")


def _from_plain(kind: Any, value: Any) -> Any:
    if getattr(kind, "__origin__", kind) is not np.ndarray:
        raise WireError(f"no way to read a {kind}")
    dtype, shape, data = value
    if dtype not in _DTYPES:
        raise WireError(f"an array of {dtype!r} is not allowed")
    return np.frombuffer(data, dtype).reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_plain)
to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine, dec_hook=_from_plain)
to_front_end: msgspec.msgpack.Decoder[ToFrontEnd] = msgspec.msgpack.Decoder(ToFrontEnd, dec_hook=_from_plain)


def encode_request(request: Request) -> msgspec.Raw:
    """A request for `Commands.of`. Each by itself, so that what cannot be written harms no other."""
    return msgspec.Raw(_encoder.encode(request))


def refuse_what_cannot_travel(params: SamplingParams) -> None:
    """Raise `RequestError` for parameters that a library takes and a message cannot hold, such as huge integers."""
    try:
        _encoder.encode(params)
    except (OverflowError, TypeError, ValueError, RecursionError) as error:
        for field in fields(params):
            try:
                _encoder.encode(getattr(params, field.name))
            except (OverflowError, TypeError, ValueError, RecursionError):
                raise RequestError(f"{field.name} is not allowed: {error}") from error
        raise RequestError(f"the sampling parameters are not allowed: {error}") from error


def encode(message: ToEngine | ToFrontEnd) -> bytes:
    """One frame."""
    body = _encoder.encode(message)
    return len(body).to_bytes(HEADER, "little") + body


class Frames:
    """Cuts a stream of bytes into the bodies of frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies that ``data`` completes.

        Raises:
            WireError: a length beyond `MAX_FRAME`.
        """
        buffer = self._data
        buffer += data
        bodies, at = list[bytes](), 0
        while len(buffer) - at >= HEADER:
            size = int.from_bytes(buffer[at : at + HEADER], "little")
            if size > MAX_FRAME:
                raise WireError(f"a frame of {size} bytes is longer than the {MAX_FRAME} that are allowed")
            end = at + HEADER + size
            if len(buffer) < end:
                break
            bodies.append(bytes(buffer[at + HEADER : end]))
            at = end
        if at:
            del buffer[:at]
        return bodies
