"""What commands read of the JSON of a router's admin server, typed.

docs/internals/admin-api.md has all of it. Fields that are not named here are ignored, so that a
router of a later version can be shown.
"""

import msgspec


class Fault(msgspec.Struct, frozen=True):
    """One of GET /faults: `extproc.base.fault.Fault`, with what to do about it."""

    code: str
    subject: str
    says: str
    fix: str


class Feed(msgspec.Struct, frozen=True):
    """A rank's feed. reason: what is wrong with it, or ""."""

    reason: str


class Speed(msgspec.Struct, frozen=True):
    """How fast a worker computes prompts. confidence: 0 to 1; 0 if nothing was learned."""

    tokens_per_second: int
    used_tokens_per_second: int
    confidence: float


class Engine(msgspec.Struct, frozen=True):
    """The engine of a worker that has said what it is."""

    name: str
    version: str | None
    frontend: str | None


class ModelContexts(msgspec.Struct, frozen=True):
    """One of GET /contexts. says: what live conversations need of the caches, in words."""

    model: str
    says: str


class Break(msgspec.Struct, frozen=True):
    """One of `breaks` in GET /misses. says: who changes prompts, where and how, in words."""

    says: str


class Sender(msgspec.Struct, frozen=True):
    """One of `clients` in GET /misses.

    tokens: by cause. cause: of most of those computed again, "" if none were. Prices: None if none
    is configured.
    """

    model: str
    client: str
    tenant: str
    turns: int
    prompt_tokens: int
    tokens: dict[str, int]
    again_tokens: int
    cause: str
    saved_seconds: float
    again_seconds: float
    again_price: float | None = None


class Turn(msgspec.Struct, frozen=True):
    """One of `turns` in GET /misses. at: seconds since 1970. says: its verdict in words."""

    at: float
    request_id: str
    conversation: int
    turn: int
    client: str
    worker: str
    prompt_tokens: int
    tokens: dict[str, int]
    says: str


class Misses(msgspec.Struct, frozen=True):
    """GET /misses. enabled: if not, the rest is empty. tokens: of all turns, by cause."""

    enabled: bool
    seconds: float = 0.0
    tokens: dict[str, int] = {}
    breaks: list[Break] = []
    clients: list[Sender] = []
    turns: list[Turn] = []


class Worker(msgspec.Struct, frozen=True):
    """One of GET /workers. Texts say why the worker is not well, and are "" if it is."""

    name: str
    endpoint: str
    state: str
    reason: str
    feeds: list[Feed]
    blocks_by_tier: dict[str, int]
    in_flight: int
    speed: Speed
    engine: Engine | None
    draining: bool
    down: str
    astray: str
    excluded: str
    source_fault: str


class Decision(msgspec.Struct, frozen=True):
    """One of GET /decisions. at: seconds since 1970. served: who answered, "" if not known."""

    at: float
    pick: list[str]
    worker: str | None
    prefill: str | None
    served: str
    steered: bool
    policy: str
    reason: str
    decided_by: str
    why: str
    prompt_tokens: int
    weighed_tokens: int
    predicted_tokens: int
    uncertain_tokens: int
    approximate_tokens: int


class Decisions(msgspec.Struct, frozen=True):
    """GET /decisions, the oldest first."""

    decisions: list[Decision]


class Events(msgspec.Struct, frozen=True):
    """GET /events."""

    enabled: bool


class Steering(msgspec.Struct, frozen=True):
    """GET /steering. percent: of the requests. fault: why picks do not arrive, or ""."""

    percent: float
    fault: str


class Series(msgspec.Struct, frozen=True):
    """Figures over time; None where there is none."""

    prompt_tokens: list[float | None]
    predicted_tokens: list[float | None]
    answered_tokens: list[float | None] = []
    reported_tokens: list[float | None] = []


class History(msgspec.Struct, frozen=True):
    """GET /history. workers: by name."""

    fleet: Series | None
    workers: dict[str, Series]


class Api(msgspec.Struct, frozen=True):
    """One of GET /apis. reasons: why requests are not keyed, the most frequent first."""

    api: str
    requests: int
    keyed: int
    reasons: dict[str, int]


class OtherRouter(msgspec.Struct, frozen=True):
    """A router that shares with this one. age_ms: of its last message."""

    name: str
    age_ms: float
    in_flight: int


class Routers(msgspec.Struct, frozen=True):
    """GET /routers. alone: why no other router is heard, or ""."""

    alone: str
    routers: list[OtherRouter]
