"""The settings of one simulated worker."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvtools.simulator.dialects import DEFAULT, DIALECTS, EventDialect
from kvtools.simulator.hashing import Adapter

_MAX_PORT = 65535


def split_address(address: str) -> tuple[str, int]:
    """Splits host:port, IPv6 in brackets.

    Raises:
        ValueError: it is not a valid address.
    """
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and int(port) <= _MAX_PORT):
        raise ValueError(f"not a host:port: {address!r}")
    bracketed = host.startswith("[") and host.endswith("]")
    if ":" in host and not bracketed:
        raise ValueError(f"an IPv6 address needs brackets: {address!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def rank_endpoint(endpoint: str, rank: int) -> str:
    """Returns the endpoint of one rank: the first port plus the rank; 0 stays any free port."""
    if not rank:
        return endpoint
    base, _, port = endpoint.rpartition(":")
    return f"{base}:{int(port) + rank}" if int(port) else endpoint


def check_rank_endpoints(endpoints: Sequence[str], ranks: int) -> None:
    """Checks that every rank gets its own ports on all endpoints.

    Raises:
        ValueError: there is no room for them, or an endpoint is not TCP.
    """
    if ranks == 1:
        return
    taken: set[int] = set()
    for endpoint in endpoints:
        scheme, _, address = endpoint.partition("://")
        if scheme != "tcp":
            raise ValueError(f"several ranks need a TCP endpoint, not {endpoint!r}")
        _, port = split_address(address)
        ports = set(range(port, port + ranks)) if port else set()
        if ports & taken or max(ports, default=0) > _MAX_PORT:
            raise ValueError(f"no room for {ranks} ranks from the port of {endpoint!r} on")
        taken |= ports


Role = Literal["prefill", "decode", "both"]
TINY_MODEL = Path(__file__).parent / "tiny_model"
_MIN_BLOCKS = 2  # one is reserved


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One worker's settings, checked when constructed (ValueError).

    Port 0 means any free port. Speeds are infinite by default: the worker answers at once.
    """

    listen: str = "127.0.0.1:0"
    """host:port of the HTTP API; IPv6 addresses in brackets."""
    name: str | None = None
    """The worker's name in the response header `x-worker`; None: the worker's host:port."""
    dialect: str = DEFAULT
    """The engine and release to imitate: a name in `dialects.DIALECTS`."""
    engine_version: str | None = None
    """The release that the worker names instead of its dialect's."""
    rust_front_end: bool = False
    """Has the paths of the engine's Rust front end, and refuses what that lacks (vLLM, SGLang)."""
    ranks: int = 1
    """Data-parallel ranks, each with a cache and publishers, behind one API."""
    ignores_ranks: bool = False
    """Compute a request on any rank, whatever rank it names, as vLLM's /v1/responses does."""
    shows_token_ids: bool = False
    """Answer chats with the ids of their prompts if requests ask for them (`return_token_ids`)."""
    ignores_token_ids: bool = False
    """Tokenize conversations although requests bring their token ids."""
    model: str = "tiny"
    """The name that requests use."""
    loras: tuple[str, ...] = ()
    """Names of LoRA adapters that requests may use instead."""
    model_dir: Path = TINY_MODEL
    """Holds the model's tokenizer and chat template."""
    chat_template: Path | None = None
    """A chat template instead of the model's own."""
    block_size_tokens: int = 16
    blocks: int = 1024
    """Blocks of each rank's cache; as in vLLM one of them is reserved."""
    bigrams: bool = False
    """SGLang only: blocks are of pairs of tokens, as with EAGLE."""
    host_blocks: int = 0
    """Evicted blocks that each rank keeps off the device."""
    placeholders: bool = False
    """vLLM only: blocks kept off the device are announced by their hashes alone."""
    max_model_len_tokens: int = 16384
    events_endpoint: str | None = "tcp://127.0.0.1:0"
    """The endpoint of KV-cache events, or None. Rank r: the port + r, unless it is 0."""
    connect: bool = False
    """Publish by connecting to `events_endpoint`, which a subscriber binds."""
    prefix_caching: bool = True
    """If off, nothing is reused, and no events are published."""
    replay_endpoint: str | None = "tcp://127.0.0.1:0"
    """The endpoint of replays, or None. Rank r: the port + r."""
    load_endpoint: str | None = None
    """SGLang only: where it is published how much there is to do; None: nowhere. Rank r: the
    port + r."""
    topic: str = ""
    buffer_batches: int = 10_000
    """How many of the latest batches can be replayed."""
    replay_limit_messages: int = 1_000
    """Of a replay, how many messages are queued for a slow reader; beyond it they are dropped, the
    end marker included. libzmq's default, and so vLLM's and SGLang's; 0: no limit."""
    drain_events: int = 10_000
    """TensorRT-LLM only: events that wait to be fetched by POST /kv_cache_events, at most."""
    misbehave: bool = False
    """Serve POST /misbehave, which breaks things on request, and GET /cache."""
    role: Role = "both"
    """Which part of requests it takes. vLLM's workers also take whole ones, SGLang's do not."""
    transfer_listen: str | None = None
    """host:port on which decode workers fetch the blocks computed here, or None."""
    transfer_tokens_per_second: float = math.inf
    """The transfer speed of blocks from other workers."""
    transfer_timeout_seconds: float = 300.0
    """How long the worker of either part waits for the other."""
    prefill_tokens_per_second: float = math.inf
    decode_tokens_per_second: float = math.inf
    """Of one request; requests do not slow each other down while decoding."""
    max_running_requests: int = 256
    shutdown_seconds: float = 0.2
    """How long it ends what it is doing before it stops; its answers are not worth more."""

    def __post_init__(self) -> None:
        split_address(self.listen)
        self._check_numbers()
        self._check_dialect()
        self._check_endpoints()
        if len({self.model, *self.loras}) != 1 + len(self.loras):
            raise ValueError("model and LoRA names must differ from each other")

    def _check_numbers(self) -> None:
        for name, least in (
            ("block_size_tokens", 1),
            ("blocks", _MIN_BLOCKS),
            ("max_model_len_tokens", 2),
            ("buffer_batches", 1),
            ("max_running_requests", 1),
            ("ranks", 1),
            ("host_blocks", 0),
            ("drain_events", 1),
            ("replay_limit_messages", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}")
        for name in ("prefill_tokens_per_second", "decode_tokens_per_second"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0")

    def _check_dialect(self) -> None:
        if self.dialect not in DIALECTS:
            raise ValueError(f"no dialect {self.dialect!r}; there are {', '.join(DIALECTS)}")
        engine = DIALECTS[self.dialect].engine
        if self.rust_front_end and engine == "trtllm":
            raise ValueError("TensorRT-LLM has no Rust front end")
        if self.bigrams and engine != "sglang":
            raise ValueError("only SGLang has bigrams")
        if self.placeholders and engine != "vllm":
            raise ValueError("only vLLM has placeholders")
        if self.load_endpoint is not None and not self.event_dialect.publishes_load:
            raise ValueError("only SGLang since 0.5.19 publishes its load")

    def _check_endpoints(self) -> None:
        if self.events_endpoint is None:
            if self.replay_endpoint is not None:
                raise ValueError("a replay endpoint needs an events endpoint")
            if self.load_endpoint is not None:
                raise ValueError("a load endpoint needs an events endpoint")
            return
        if self.connect and self.events_endpoint.endswith(":0"):
            raise ValueError("there is no port 0 to connect to")
        named = (self.events_endpoint, self.replay_endpoint, self.load_endpoint)
        endpoints = [one for one in named if one]
        check_rank_endpoints(endpoints, self.ranks)
        any_port = any(one.endswith(":0") for one in endpoints)
        if any_port and self.ranks > 1 and self.event_dialect.engine == "sglang":
            raise ValueError("SGLang tells one port for all ranks: give it one that is not 0")

    @property
    def event_dialect(self) -> EventDialect:
        """The dialect itself."""
        return DIALECTS[self.dialect]

    @property
    def named_version(self) -> str:
        """The release that the worker names."""
        return self.event_dialect.version if self.engine_version is None else self.engine_version

    @property
    def adapters(self) -> dict[str, Adapter]:
        """The LoRA adapters by name."""
        return {name: Adapter(name, number) for number, name in enumerate(self.loras, start=1)}

    @property
    def context_tokens(self) -> int:
        """The longest prompt and answer together: the model's limit, or what the cache can hold."""
        return min(self.max_model_len_tokens, (self.blocks - 1) * self.block_size_tokens)
