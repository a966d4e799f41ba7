"""ServerOptions: every option of the server that is not one of the engine, checked once."""

from __future__ import annotations

from dataclasses import dataclass

from gapless.errors import ConfigError

TOOL_PARSERS = ("auto", "hermes", "llama", "mistral", "none")
REASONING_PARSERS = ("auto", "think", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Options of ``gapless serve``.

    Attributes:
        host: address to listen on. Others than this machine can reach the server only if it is another one, such as
            0.0.0.0; give keys then.
        port: to listen on; 0 takes a free one and logs it.
        uds: path of a Unix socket to listen on instead.
        served_model_name: what clients call the model; several names with commas. None: the model as it was given.
        tokenizer: folder or name, if it is not the model's.
        skip_tokenizer: serve token ids for token ids; no text, no chat.
        api_key: keys, with commas. Whoever may list this machine's processes sees them there; a file or the variable
            GAPLESS_API_KEY is better.
        api_key_file: file with one key a line, beside those of the variable GAPLESS_API_KEY. Without any, no key is
            asked for.
        ssl_certfile: certificate, in PEM form: serve HTTPS.
        ssl_keyfile: its private key, if it is not in the same file.
        public_metrics: /metrics asks for no key.
        allowed_hosts: names, with commas, that a request's Host header may have; * allows all. None: when bound to
            this machine only, its local names, else all.
        allowed_origins: of web pages that may use this server, with commas, such as https://chat.example; * allows
            all. Others are refused, but for pages of the server's own address.
        chat_template: file with a Jinja template in the place of the model's own.
        max_request_seconds: after which a request is ended with an error, 408; 0 for never.
        max_queued_requests: sequences that may wait beyond max_num_seqs; more are refused with 503.
        max_queued_tokens: tokens of prompts that may wait; more are refused with 503.
        max_n: completions of one prompt that may be asked for.
        max_prompts: prompts of one request.
        max_body_bytes: largest body of a request.
        max_connections: open at once; the limit of file descriptors may make it less.
        header_timeout: seconds in which a request's head must be complete.
        body_timeout: seconds without at least a kilobyte a second after which a slow body is given up.
        write_timeout: seconds that a client may take nothing of its stream.
        stream_buffer_tokens: tokens that may wait for a slow client before its request is ended.
        keep_alive_timeout: seconds that an idle connection stays open.
        sse_keep_alive_interval: seconds without a token after which a stream gets a comment; 0 for never.
        stream_interval: tokens that go into one chunk at least, but for the first and the last chunk.
        shutdown_timeout: seconds that running requests have to end after SIGTERM.
        hang_timeout: seconds without any progress of an engine with work after which /health fails.
        metrics_prefix: first part of the names of metrics; vllm serves dashboards that were made for it.
        tool_call_parser: form of the model's tool calls: auto, hermes, llama, mistral or none.
        reasoning_parser: think splits off what stands between <think> tags; auto does if the template knows them.
        dev_routes: also offer routes that stop, empty and free the engine: /pause, /resume, /sleep, /wake_up,
            /reset_prefix_cache. For developers, not for a server that others can reach.
        log_format: plain or json.
        log_level: debug, info, warning or error.
        access_log: a line for each request.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    served_model_name: str | None = None
    tokenizer: str | None = None
    skip_tokenizer: bool = False
    api_key: str | None = None
    api_key_file: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    public_metrics: bool = False
    allowed_hosts: str | None = None
    allowed_origins: str | None = None
    chat_template: str | None = None
    max_request_seconds: float = 0.0
    max_queued_requests: int = 1024
    max_queued_tokens: int | None = None
    max_n: int = 128
    max_prompts: int = 1024
    max_body_bytes: int = 32 * 2**20
    max_connections: int = 8192
    header_timeout: float = 20.0
    body_timeout: float = 20.0
    write_timeout: float = 60.0
    stream_buffer_tokens: int = 16384
    keep_alive_timeout: int = 75
    sse_keep_alive_interval: float = 0.0
    stream_interval: int = 1
    shutdown_timeout: float = 30.0
    hang_timeout: float = 120.0
    metrics_prefix: str = "gapless"
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    dev_routes: bool = False
    log_format: str = "plain"
    log_level: str = "info"
    access_log: bool = True

    def __post_init__(self) -> None:
        def refuse(name: str, allowed: str) -> ConfigError:
            return ConfigError(f"{name}={getattr(self, name)!r} is not allowed: {allowed}")

        if not 0 <= self.port < 65536:
            raise refuse("port", "an integer from 0 to 65535")
        for name in ("max_n", "max_prompts", "max_body_bytes", "max_connections", "stream_interval"):
            if getattr(self, name) < 1:
                raise refuse(name, "an integer >= 1")
        for name in ("max_queued_requests", "stream_buffer_tokens", "keep_alive_timeout"):
            if getattr(self, name) < 0:
                raise refuse(name, "an integer >= 0")
        if self.max_queued_tokens is not None and self.max_queued_tokens < 1:
            raise refuse("max_queued_tokens", "an integer >= 1, or None")
        for name in ("header_timeout", "body_timeout", "write_timeout", "hang_timeout"):
            if not 0 < getattr(self, name) < float("inf"):
                raise refuse(name, "a number of seconds > 0")
        for name in ("max_request_seconds", "shutdown_timeout", "sse_keep_alive_interval"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise refuse(name, "a number of seconds >= 0")
        for name, known in (
            ("tool_call_parser", TOOL_PARSERS),
            ("reasoning_parser", REASONING_PARSERS),
            ("log_format", ("plain", "json")),
            ("log_level", ("debug", "info", "warning", "error")),
        ):
            if getattr(self, name) not in known:
                raise refuse(name, f"one of {', '.join(known)}")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise refuse("ssl_keyfile", "only with ssl_certfile, the certificate that it belongs to")
        if not self.metrics_prefix.isidentifier():
            raise refuse("metrics_prefix", "letters, digits and _")
        if self.served_model_name is not None and not all(self.model_names("")):
            raise refuse("served_model_name", "names with commas, none of them empty")

    def model_names(self, model: str) -> list[str]:
        """What clients may call the model; the first name is in the answers."""
        return [model] if self.served_model_name is None else [n.strip() for n in self.served_model_name.split(",")]
