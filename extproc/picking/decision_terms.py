"""What a decision is asked, what it looks at, and what comes of it."""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum

import msgspec

from extproc.picking.claims import Claims
from extproc.picking.eligibility import ANY, Demand, Worker
from extproc.picking.load import Load
from extproc.picking.marks import Marks
from extproc.picking.ranks import Ranks
from extproc.picking.rules import Rules
from extproc.picking.sent import Sent
from kvstate.overlap import Overlap, Prompt


class Verdict(Enum):
    """What is to become of a request.

    STEER: it goes to the pick. NO_OVERRIDE: nothing is said, the proxy chooses. UNAVAILABLE: 503.
    SHED: 429, every worker is over its limit.
    """

    STEER = "steer"
    NO_OVERRIDE = "no_override"
    UNAVAILABLE = "unavailable"
    SHED = "shed"


class Query(msgspec.Struct, frozen=True):
    """What is to be placed.

    model: the configured model; None where the request names none that is known.
    prompts: what could be keyed. reason: why nothing could be, "" if something was. text: what was
    read where nothing could be keyed; it is compared with what was sent before, under the same
    adapter and salt (lora, salt; a salt of "": one that is not known, and compares with none).
    unread_bytes: of a body that was not read. reads_cache: False where the worker computes the
    whole prompt, whatever it holds of it. left_to_proxy: why the proxy is to choose, "" if it is
    not to. demand: which workers it may go to. policy: what it asks for in its header, if that is
    configured. answers: how many are asked for, to each prompt.
    """

    model: str | None
    prompts: Sequence[Prompt] = ()
    reason: str = ""
    text: bytes = b""
    lora: str | None = None
    salt: str | None = None
    unread_bytes: int = 0
    reads_cache: bool = True
    left_to_proxy: str = ""
    demand: Demand = ANY
    policy: str | None = None
    answers: int = 1

    @property
    def sole(self) -> Prompt | None:
        """Its prompt, where it is one and one answer is asked for.

        Of such a request alone an engine's report can be compared: vLLM's is the sum over prompts,
        or of the answer that came last, whose blocks the first one stored.
        """
        return self.prompts[0] if len(self.prompts) == 1 and self.answers == 1 else None


def _always_live(_: str) -> str:
    return "live"


def one_token(_: str) -> int:
    """The block size of a worker of which none is known: any length counts."""
    return 1


class Snapshot(msgspec.Struct, frozen=True):
    """All that a decision looks at besides the query and the time.

    held: for each prompt, the overlap of every worker that holds something of it. load: of an
    endpoint, at a time. turn: decisions so far for this model. sent: what was sent where. state: of
    a worker's feeds, by name. unfit: endpoints that get no requests, and why. left_out: endpoints
    that fail, and why, to be picked only where no other one is left. ranks: what is known of ranks,
    where requests may name one. block_size: of a worker's cache, in tokens, by name.
    """

    workers: Sequence[Worker]
    held: Sequence[Mapping[str, Overlap]]
    load: Callable[[str, float], Load]
    policy: str
    turn: int
    rules: Rules = Rules()
    sent: Sent | None = None
    state: Callable[[str], str] = _always_live
    unfit: Mapping[str, str] = {}
    left_out: Mapping[str, str] = {}
    ranks: Ranks | None = None
    block_size: Callable[[str], int] = one_token


class Decision(msgspec.Struct, frozen=True):
    """Where a request goes, and all that it was decided on.

    pick: ip:port, best first; empty where we have nothing to say. reason: overlap, or why the pick
    was made without it; docs/metrics.md lists them. certain_tokens, uncertain_tokens,
    uncached_tokens: of the first pick. worker: its name, "" if there is none. weighed_tokens: those
    of the prompt, or an estimate from its text. marks: of each prompt, to be recorded where it is
    sent.
    workers, excluded, loads and costs belong together: all candidates, why each cannot be picked
    ("" if it can), its load and its cost (None where neither was looked at). held: the overlaps of
    each prompt. claims: what was made of them, by name. affinity, running: the
    weights of an uncached token and of a request in flight. rank: the data-parallel rank that the
    request is to name, None for none.
    """

    model: str | None
    prompt_tokens: int
    pick: tuple[str, ...]
    reason: str
    certain_tokens: int
    uncertain_tokens: int
    uncached_tokens: float
    workers: Sequence[Worker]
    loads: Sequence[Load | None]
    held: Sequence[Mapping[str, Overlap]]
    worker: str
    verdict: Verdict
    policy: str
    weighed_tokens: float
    marks: Sequence[Marks]
    excluded: Sequence[str]
    costs: Sequence[float | None]
    claims: Mapping[str, Claims]
    affinity: float
    running: float
    rank: int | None = None
