"""The two inputs of a decision: the query to place, and a snapshot of what it depends on."""

from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec
from msgspec import structs

from extproc._core import LoadColumns
from extproc.config.schema import Policy
from extproc.media.prompts import MediaPrompt
from extproc.requests.outline import Outline
from extproc.requests.request import NO_HEADERS
from extproc.requests.request_class import RequestClass
from extproc.requests.tenant_salt import Tenant
from extproc.routing.claim_table import ClaimTable
from extproc.routing.eligibility import ANY, Candidate, Demand, Roster
from extproc.routing.fetching import Offers
from extproc.routing.homes import Homes
from extproc.routing.load import Load
from extproc.routing.ranks import Ranks
from kvstate.overlap import Overlap, Prompt


class Variant(msgspec.Struct, frozen=True):
    """What a request is to workers whose engines read it differently.

    workers: their names. prompts, forms: as in Query; no prompts if it cannot be keyed for them.
    """

    workers: frozenset[str]
    prompts: Sequence[Prompt]
    forms: int


class MediaItem(msgspec.Struct, frozen=True):
    """A media item of a request.

    kind: image, audio or video. is_known: whether its tokens are known. is_exact: whether it stays
    what it is; what lies behind a URL may change. tokens: how many it has, an average if it is not
    known.
    """

    kind: str
    is_known: bool
    is_exact: bool
    tokens: float


class Media(msgspec.Struct, frozen=True):
    """The media of a request whose prompt is keyed as far as its items are known.

    items: in order. weighed_tokens: of the whole prompt, estimated behind the first unknown item.
    is_whole: whether the prompt is keyed to its end. text_tokens: those of the prompt before its
    first item. prompt: its texts and items, None if these were not found in it.
    """

    items: Sequence[MediaItem]
    weighed_tokens: float
    is_whole: bool
    text_tokens: int
    prompt: MediaPrompt | None = None

    @property
    def is_known(self) -> bool:
        """Whether all of its items are known for certain."""
        return self.is_whole and all(one.is_exact for one in self.items)


class Query(msgspec.Struct, frozen=True):
    """A request to place.

    model: the configured model; None if the request names no known one. prompts: the keyed prompts.
    reason: why there are no prompts, "" if there are. outline: of a prompt without tokens, or with
    media; it is compared with earlier ones of the same adapter and salt (lora, salt; a salt of ""
    is unknown and matches none). media: that of the only prompt, None without any. unread_bytes:
    size of a body that was not read. reads_cache: False if the
    worker will compute the whole prompt, whatever it holds. proxy_reason: why the proxy chooses,
    "" if it does not. demand: which workers are allowed. policy: the policy named in its header, if
    that is configured. answers: how many answers it wants for each prompt. forms: the forms of the
    prompts that were tokenized here (`extproc.requests.prompt`), 0 if the client sent token ids.
    may_split: whether one worker can compute the prompt and another one answer. session: the
    client's session, "" for none; it counts only if the prompt's tokens are not known. previous:
    the id of the response that it continues, "" for none. variants: what it is to workers whose
    engines read it differently. of_class: its class, None without classes. tenant: whose it is,
    None if nobody asks. policy_headers: the values of the headers that policies read, by the keys
    that name them.
    """

    model: str | None
    prompts: Sequence[Prompt] = ()
    reason: str = ""
    outline: Outline | None = None
    media: Media | None = None
    lora: str | None = None
    salt: str | None = None
    unread_bytes: int = 0
    reads_cache: bool = True
    proxy_reason: str = ""
    demand: Demand = ANY
    policy: str | None = None
    answers: int = 1
    forms: int = 0
    may_split: bool = True
    session: str = ""
    previous: str = ""
    variants: Sequence[Variant] = ()
    of_class: RequestClass | None = None
    tenant: Tenant | None = None
    policy_headers: Mapping[str, bytes] = NO_HEADERS

    def query_for(self, worker: str) -> "Query":
        """Returns the query as a worker's engine reads it."""
        for one in self.variants:
            if worker in one.workers:
                return structs.replace(self, prompts=one.prompts, forms=one.forms, variants=())
        return self

    @property
    def sole(self) -> Prompt | None:
        """The prompt if there is only one, with one answer; else None.

        Only then can the engine's report be compared: vLLM reports the sum over prompts, or the
        last of several answers, whose blocks the first answer stored.
        """
        return self.prompts[0] if len(self.prompts) == 1 and self.answers == 1 else None


def _always_live(_: str) -> str:
    return "live"


def one_token(_: str) -> int:
    """Returns 1: without a known block size, any length counts."""
    return 1


def no_conversations(_: str, __: float) -> int:
    """Returns 0: no conversation is followed."""
    return 0


class Snapshot(msgspec.Struct, frozen=True):
    """Everything that a decision depends on besides the query and the time.

    overlaps: for each prompt, the overlaps of the workers that hold a part of it. load: returns the
    load of an endpoint at a time. turn: decisions so far for this model. claims: the record of
    earlier requests. state: returns the state of a worker's feeds, by name. unfit: endpoints that
    get no requests, and why. ejected: failing endpoints, and why; picked only if no other is left.
    doubted: endpoints whose last answer failed or came from elsewhere; they compute prompts for
    others only if all are doubted. ranks: the workers' ranks, if requests may name one. block_size:
    returns the block size of a worker's cache in tokens, by name. sample: how many random workers
    are compared, besides those that hold a part of the prompt; 0 compares all. roster: the workers'
    roster, None if not made yet. homes: the workers of conversations. conversations: returns how
    many of them live on a worker at a time, by its name. columns: returns the loads of several
    workers at a time; None to ask `load` for each. offers: what workers could fetch of the prompt
    from each other or from stores; None for nothing.
    """

    workers: Sequence[Candidate]
    overlaps: Sequence[Mapping[str, Overlap]]
    load: Callable[[str, float], Load]
    policy: str
    turn: int
    rules: Policy = Policy()
    claims: ClaimTable | None = None
    state: Callable[[str], str] = _always_live
    unfit: Mapping[str, str] = {}
    ejected: Mapping[str, str] = {}
    doubted: Collection[str] = ()
    ranks: Ranks | None = None
    block_size: Callable[[str], int] = one_token
    sample: int = 0
    roster: Roster | None = None
    homes: Homes | None = None
    conversations: Callable[[str, float], int] = no_conversations
    columns: Callable[[Sequence[Candidate], float], LoadColumns] | None = None
    offers: Offers | None = None
