"""The query: what is asked of the workers for a request."""

from collections.abc import Sequence

import msgspec
from msgspec import structs

from extproc.media.prompts import MediaPrompt
from extproc.requests.outline import Outline
from extproc.requests.request import RoutingRequest
from extproc.routing.candidates.eligibility import Demand
from kvstate.overlap import Prompt


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
    """What is asked of the workers for a request: its prompts, or what is known without them."""

    # The configured model; None if the request names no known one.
    model: str | None
    # The keyed prompts.
    prompts: Sequence[Prompt] = ()
    # Why there are no prompts, "" if there are.
    reason: str = ""
    # Of a prompt without tokens, or with media: compared with earlier ones of the same adapter and
    # salt.
    outline: Outline | None = None
    # That of the only prompt, None without any.
    media: Media | None = None
    # The adapter that the request names.
    lora: str | None = None
    # The salt of its cache, for comparing outlines; "" is unknown and matches none.
    salt: str | None = None
    # Size of a body that was not read.
    unread_bytes: int = 0
    # False if the worker will compute the whole prompt, whatever it holds.
    reads_cache: bool = True
    # Why the proxy chooses, "" if it does not.
    proxy_reason: str = ""
    # How many answers it wants for each prompt.
    answers: int = 1
    # The forms of the prompts that were tokenized here (`extproc.requests.prompt`), 0 if the client
    # sent token ids.
    forms: int = 0
    # The client's session that its body names, "" for none.
    session: str = ""
    # The id of the response that it continues, "" for none.
    previous: str = ""
    # What it is to workers whose engines read it differently.
    variants: Sequence[Variant] = ()
    # Whether its engine needs the text of its prompt, even if it is given the ids.
    needs_text: bool = False

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


def demand_of(request: RoutingRequest, query: Query) -> Demand:
    """Returns what a request requires of a worker."""
    return Demand(query.lora, request.head.subset)
