"""What all streams of a server share: the router, the metrics, and what follows from settings."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from extproc._core import Budget
from extproc.config.owned_headers import owned_headers
from extproc.config.schema import Config
from extproc.config.sections import session_headers
from extproc.http2.limits import MIB
from extproc.observing.metrics import Metrics
from extproc.routing.policy_choice import endpoints_named
from extproc.serving.naming_headers import NamingHeaders
from extproc.serving.proxy_decoder import ProxyDecoder
from extproc.serving.router import Router
from extproc.serving.stream import StreamSettings
from extproc.serving.stream_answers import AnswerCache

# Memory for collected bodies: in dialect B the router collects them; in dialect A, Envoy does.
_BODIES_BYTES = 1024 * MIB


class SharedByStreams:
    """What all streams of a server share.

    monotonic: a clock in seconds, for the times of responses. is_traced: whether requests are
    traced. passes_named: whether requests are to have the values of features' headers.
    looks_at_headers: whether requests' headers say more than a stream reads. accounts: whether
    responses are accounted for. reads_usage: whether their reported tokens are, too.
    hooks: of enabled features. decoder: of the proxy's messages.
    names_model: whether the proxy is told the model.
    endpoints, duplex_endpoints: how many of a pick a proxy is told at most, in dialects A and B.
    """

    def __init__(
        self,
        config: Config,
        router: Router,
        metrics: Metrics,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.router = router
        self.hooks = router.hooks
        self.metrics = metrics
        self.monotonic = monotonic
        self.is_traced = router.is_traced
        self.accounts = config.accounting.responses != "none"
        self.reads_usage = config.accounting.responses == "usage"
        self.preparation = router.preparation
        self.prepares = router.preparation.is_needed
        self.passes_named = router.hooks.wants_named
        self.looks_at_headers = self.prepares or self.is_traced or self.passes_named
        self.joining = ThreadPoolExecutor(1, thread_name_prefix="joining")
        self.endpoints = endpoints_named(config.policy, is_duplex=False)
        self.duplex_endpoints = endpoints_named(config.policy, is_duplex=True)
        answer_cache = AnswerCache(owned_headers(config))
        self.names_model = answer_cache.names_model
        header = config.policy.header
        self.stream_settings = StreamSettings(
            max_body_bytes=config.extproc.max_body_bytes,
            bodies=Budget(_BODIES_BYTES),
            policy_header=None if header is None else header.lower(),
            naming=NamingHeaders.of(
                session_headers(config.policy.session_header), router.steering.headers
            ),
            dialect=config.extproc.dialect,
            reads_usage=self.reads_usage,
            cleans=self.preparation.reads_bodies,
            answer_cache=answer_cache,
            paths=router.paths,
            note_unrecognized=router.unrecognized.note,
        )
        names = self.stream_settings.header_names()
        self.decoder = ProxyDecoder(
            names,
            self.preparation.headers,
            self.stream_settings.naming,
            self.stream_settings.policy_header,
        )
