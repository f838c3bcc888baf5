"""Whether the ids of a request's prompt go with it, so that its engine need not make them again.

`extproc.features.handing` decides it; here is what the decision says of it, and in which words.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec

from extproc.proof.samples import HANDED, REFUTED, SAMPLE, Samples
from kvstate.overlap import Tokens

# Why ids stay here, besides what samples say (`extproc.proof.samples`).
UNKEYED, SEVERAL, MEDIA, TEXT, API = "unkeyed", "several", "media", "text", "api"
GIVEN, FEW, LEGS, BODY = "given", "few_tokens", "legs", "body"
DIFFERS, UNPROVED, NOT_LIVE = "differs", "unproved", "feed_not_live"

WORDS: Mapping[str, str] = MappingProxyType(
    {
        HANDED: "its token ids go with it",
        SAMPLE: "it is a sample: it goes without its token ids, and what its engine counts is"
        " compared",
        REFUTED: "a sample disagreed",
        UNKEYED: "its tokens are not known",
        SEVERAL: "it has several prompts, or wants several answers",
        MEDIA: "it has media",
        TEXT: "its engine needs the text: the answer repeats it, goes on with it or cuts it, or the"
        " request says itself what is transferred",
        API: "no engine takes token ids on this path",
        GIVEN: "the client sends token ids itself",
        FEW: "its prompt is short",
        LEGS: "another worker has a part in it, of which a header tells",
        BODY: "its body must not be changed, or cannot be",
        DIFFERS: "its workers' engines read it differently",
        UNPROVED: "its tokens are not proved at a worker that may get it, or that takes no token"
        " ids",
        NOT_LIVE: "the feed of a worker that is named is not live, so a restart might not be seen",
    }
)
OUTCOMES = tuple(WORDS)


class Handing(msgspec.Struct, eq=False):
    """Whether the ids of a request's prompt go with it.

    outcome: one of `OUTCOMES`. tokens: those that go with it, None for none, and once it is over,
    since decisions are kept longer. traits: of the request. samples, start: of the worker that is
    picked, None if ids stay here anyway. prompt_tokens: how many the prompt has. worker: of which
    the outcome tells, "" for none.
    """

    outcome: str
    tokens: Tokens | None = None
    traits: Sequence[str] = ()
    samples: Samples | None = None
    start: int = 0
    prompt_tokens: int = 0
    worker: str = ""

    @property
    def is_handed(self) -> bool:
        """Whether the ids go with it."""
        return self.outcome == HANDED

    @property
    def handed_tokens(self) -> int:
        """How many ids go with it."""
        return self.prompt_tokens if self.is_handed else 0

    @property
    def in_words(self) -> str:
        """The outcome in words."""
        said = WORDS[self.outcome]
        return f"{said} ({self.worker})" if self.worker else said
