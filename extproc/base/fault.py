"""A fault: something that lowers what a running router is worth, and fails no request.

Each kind is named here, with what to do about it; docs/troubleshooting.md has the same table.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

ROUTER = "router"

# How the lines of /readyz begin that are no faults: they name what the router does not see.
NOTE = "note: "

# Most faults that are shown: of a hundred workers with the same fault, some are enough.
MAX_SHOWN = 50


class FaultKind(NamedTuple):
    """A kind of fault.

    fix: what to do about it. is_logged: whether the part that finds it logs it itself, in more
    detail. alert: the alert that fires.
    """

    fix: str
    is_logged: bool = False
    alert: str = "KvsteerFault"


# The kinds of faults, by code.
KINDS: Mapping[str, FaultKind] = {
    "block-size-differs": FaultKind("set `workers[].block_size` to the engine's, or leave it out"),
    "bodies-compressed": FaultKind(
        "let Envoy decompress them: `envoy.filters.http.decompressor` before ext_proc"
    ),
    "bodies-not-sent": FaultKind(
        "set `request_body_mode: BUFFERED` (or FULL_DUPLEX_STREAMED) in Envoy's ext_proc filter"
    ),
    "clock-differs": FaultKind(
        "synchronize the clocks (NTP); if they agree, look for what holds the events up"
    ),
    "decisions-late": FaultKind(
        "give the router a core of its own, or more processes; see `kvsteer_phase_seconds`",
        alert="KvsteerDecisionsLate",
    ),
    "discovery-fault": FaultKind(
        "correct the source, or its network access and permissions",
        is_logged=True,
        alert="KvsteerDiscoveryFault",
    ),
    "envoy-fails-open": FaultKind(
        "set `failure_mode_allow: false` in its ext_proc filter, as `kvsteer envoy` prints it, or"
        " `isolation.fail: open`"
    ),
    "feed-degraded": FaultKind(
        "set `events.replay`, or see that it answers: with it a feed is complete again at once",
        alert="KvsteerFeedDegraded",
    ),
    "feed-not-live": FaultKind(
        "see that the engine publishes at `events`, and that the router reaches it; `kvsteer"
        " doctor` looks",
        alert="KvsteerFeedNotLive",
    ),
    "feed-silent": FaultKind(
        "see that `events.topic` is empty or the publisher's, that what relays the feed passes all"
        " of it on, and that the engine publishes; `kvsteer doctor --probe` looks"
    ),
    "feed-unsequenced": FaultKind(
        "have the publisher, or what relays it, send [topic, 8 bytes of a number, batch] as vLLM"
        " does; `events.zmq` may name another server's port",
        is_logged=True,
    ),
    "handover-refuted": FaultKind(
        "find out which tokens differ (GET /models, `kvsteer doctor`); it is tried again once the"
        " engine starts anew",
        is_logged=True,
    ),
    "model-unknown": FaultKind(
        "name the model in `models[].name` or `aliases`, an adapter in `models[].lora`"
    ),
    "no-full-attention": FaultKind(
        "leave `events` out for its workers: without them, requests stay on their workers as well,"
        " by what was sent there"
    ),
    "not-asked": FaultKind(
        "give Envoy the ext_proc filter and the router's cluster (`kvsteer envoy --patch`), and see"
        " that no route switches it off; `kvsteer doctor` looks"
    ),
    "not-delivered": FaultKind(
        "see that Envoy's cluster holds the workers, and that the route leads to it; `kvsteer"
        " doctor` looks",
        is_logged=True,
        alert="KvsteerNotDelivered",
    ),
    "paths-unrecognized": FaultKind(
        "name what Envoy's routes take away from the front of paths in `extproc.path_prefixes`, or"
        " switch ext_proc off on routes that lead to other servers"
    ),
    "predictions-wrong": FaultKind(
        "docs/internals/reasons.md has all causes, under Why predictions drift; it ends when 6 of"
        " the last 8 predictions were right"
    ),
    "prefix-caching-off": FaultKind(
        "turn prefix caching on: vLLM's --enable-prefix-caching, SGLang's radix cache"
    ),
    "routers-share-nothing": FaultKind(
        "configure `sharing`, or `envoy.routers.choice: standby`; one router is quicker than two"
        " that share nothing"
    ),
    "sharing-alone": FaultKind(
        "see that the Valkey at `sharing.url` answers", is_logged=True, alert="KvsteerSharingAlone"
    ),
    "tls-ends": FaultKind(
        "renew the certificate: new files are loaded without a restart",
        alert="KvsteerCertificateEnds",
    ),
    "tls-files": FaultKind(
        "correct the files of `extproc.tls`: they are loaded as soon as they are right",
        is_logged=True,
        alert="KvsteerTlsFault",
    ),
    "tokens-differ": FaultKind(
        "point `models[].tokenizer` and `models[].chat_template` to the files that the engine was"
        " started with; GET /models shows the first difference",
        is_logged=True,
        alert="KvsteerTokensDiffer",
    ),
    "tokens-unproved": FaultKind(
        "see that a worker answers golden requests; GET /models says why none was compared",
        is_logged=True,
        alert="KvsteerTokensDoubted",
    ),
    "worker-asleep": FaultKind(
        "wake it with `POST /wake_up`, or leave it out of the fleet while it sleeps"
    ),
    "worker-down": FaultKind(
        "start the engine, or see why it does not answer", is_logged=True, alert="KvsteerWorkerDown"
    ),
    "worker-several-addresses": FaultKind(
        "use `discovery.dns`, which makes a worker of each address, or name one address",
        is_logged=True,
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


# Returns the faults that are present now; None wherever others may have a turn.
FaultSource = Callable[[], Iterable[Fault | None]]

# Workers that are looked at without a pause: a fraction of a millisecond.
WORKERS_AT_ONCE = 16
