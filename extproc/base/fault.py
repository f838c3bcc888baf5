"""A fault: something that lowers what a running router is worth, and fails no request.

Each kind is named here, with what to do about it; docs/failures.md has the same table.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

ROUTER = "router"


class Kind(NamedTuple):
    """A kind of fault.

    fix: what to do about it. is_told: whether the part that finds it logs it itself, in more
    detail. alert: the alert that fires.
    """

    fix: str
    is_told: bool = False
    alert: str = "KvsteerFault"


# The kinds of faults, by code.
KINDS: Mapping[str, Kind] = {
    "envoy-fails-open": Kind(
        "set `failure_mode_allow: false` in its ext_proc filter, as `kvsteer envoy` prints it, or"
        " `isolation.fail: open`"
    ),
    "feed-silent": Kind(
        "see that `events.topic` is empty or the publisher's, that what relays the feed passes all"
        " of it on, and that the engine publishes; `kvsteer doctor --probe` looks"
    ),
    "feed-unsequenced": Kind(
        "have the publisher, or what relays it, send [topic, 8 bytes of a number, batch] as vLLM"
        " does; `events.zmq` may name another server's port",
        is_told=True,
    ),
    "no-full-attention": Kind(
        "leave `events` out for its workers: without them, requests stay on their workers as well,"
        " by what was sent there"
    ),
    "not-delivered": Kind(
        "see that Envoy's cluster holds the workers, and that the route leads to it; `kvsteer"
        " doctor` looks",
        is_told=True,
        alert="KvsteerNotDelivered",
    ),
    "predictions-wrong": Kind(
        "docs/metrics.md has all causes, under Why predictions drift; it ends when 6 of the last 8"
        " predictions were right"
    ),
    "prefix-caching-off": Kind(
        "turn prefix caching on: vLLM's --enable-prefix-caching, SGLang's radix cache"
    ),
    "sharing-alone": Kind(
        "see that the Valkey at `sharing.url` answers", is_told=True, alert="KvsteerSharingAlone"
    ),
    "tokens-differ": Kind(
        "point `models[].tokenizer` and `models[].chat_template` to the files that the engine was"
        " started with; GET /models shows the first difference",
        is_told=True,
        alert="KvsteerTokensDiffer",
    ),
    "tokens-unproved": Kind(
        "see that a worker answers golden requests; GET /models says why none was compared",
        is_told=True,
        alert="KvsteerTokensDoubted",
    ),
}


class Fault(NamedTuple):
    """Something that is wrong now.

    code: one of `KINDS`. subject: what it is about, such as "worker 10.0.0.1:8000", "model m" or
    "router". says: the fault in words, without prompts and secrets.
    """

    code: str
    subject: str
    says: str

    @property
    def fix(self) -> str:
        """What to do about it."""
        return KINDS[self.code].fix

    def __str__(self) -> str:
        about = "" if self.subject == ROUTER else f"{self.subject}: "
        return f"{about}{self.says}; {self.fix}"


# Returns the faults that are present now.
FaultSource = Callable[[], Iterable[Fault]]
