"""What one simulated worker is told."""

import math
from dataclasses import dataclass
from pathlib import Path

TINY_MODEL = Path(__file__).parent / "tiny_model"
_MAX_PORT = 65535
_MIN_BLOCKS = 2  # one is reserved


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One worker's settings, checked when constructed (ValueError).

    A port 0 means any free one. Speeds are infinite by default: the worker answers at once.
    """

    listen: str = "127.0.0.1:0"
    """host:port of the HTTP API; IPv6 addresses in brackets."""
    name: str | None = None
    """Who answered, as the `x-worker` response header tells; None: the worker's host:port."""
    model: str = "tiny"
    """The name that requests use."""
    loras: tuple[str, ...] = ()
    """Names of LoRA adapters that requests may use instead."""
    model_dir: Path = TINY_MODEL
    """Holds the model's tokenizer and chat template."""
    block_size_tokens: int = 16
    blocks: int = 1024
    """Blocks of the cache; as in vLLM one of them is reserved."""
    max_model_len_tokens: int = 16384
    events_endpoint: str | None = "tcp://127.0.0.1:0"
    """Where KV-cache events are published; None: nowhere."""
    replay_endpoint: str | None = "tcp://127.0.0.1:0"
    """Where published events can be asked for again; None: nowhere."""
    topic: str = ""
    buffer_batches: int = 10_000
    """How many of the latest batches can be asked for again."""
    prefill_tokens_per_second: float = math.inf
    decode_tokens_per_second: float = math.inf
    """Of one request; requests do not slow each other down while decoding."""
    max_running_requests: int = 256

    def __post_init__(self) -> None:
        split_address(self.listen)
        for name, least in (
            ("block_size_tokens", 1),
            ("blocks", _MIN_BLOCKS),
            ("max_model_len_tokens", 2),
            ("buffer_batches", 1),
            ("max_running_requests", 1),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}")
        for name in ("prefill_tokens_per_second", "decode_tokens_per_second"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0")
        if self.replay_endpoint is not None and self.events_endpoint is None:
            raise ValueError("a replay endpoint needs an events endpoint")
        if len({self.model, *self.loras}) != 1 + len(self.loras):
            raise ValueError("model and LoRA names must differ from each other")

    @property
    def context_tokens(self) -> int:
        """The longest prompt and answer together: the model's limit, or what the cache can hold."""
        return min(self.max_model_len_tokens, (self.blocks - 1) * self.block_size_tokens)


def split_address(address: str) -> tuple[str, int]:
    """Host (without brackets) and port of a host:port."""
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and int(port) <= _MAX_PORT):
        raise ValueError(f"not a host:port: {address!r}")
    bracketed = host.startswith("[") and host.endswith("]")
    if ":" in host and not bracketed:
        raise ValueError(f"an IPv6 address needs brackets: {address!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)
