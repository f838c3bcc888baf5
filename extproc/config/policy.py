"""How a worker is picked."""

from dataclasses import dataclass

from extproc.config.key import key

POLICIES = ("cost", "cache_aware", "prefix_cache", "least_request", "round_robin", "random")


@dataclass(frozen=True, slots=True)
class Cost:
    """The weights of policy `cost`."""

    affinity_percent: int = key(
        "what an uncached prompt token costs on an idle fleet, in percent of one that is queued"
        " before the request",
        100,
    )
    busy_affinity_percent: int = key(
        "how much more it costs on a fleet that is half busy or more; higher keeps prompts longer"
        " where their prefix is",
        100,
    )
    running_tokens: int = key("what each request in flight on a worker costs, in tokens", 128)
    uncertain_percent: int = key(
        "what a token in a block that may be there saves, in percent of one that is", 50
    )
    speculative_percent: int = key(
        "the same of a token that is expected since a request with it is under way there", 90
    )
    approximate_percent: int = key(
        "the same of a token that was sent to a worker without events", 90
    )
    prefill_tokens_per_second: int = key(
        "uncached prompt tokens that a worker is taken to compute in a second", 8_000, minimum=1
    )


@dataclass(frozen=True, slots=True)
class CacheAware:
    """The knobs of policy `cache_aware`, as SMG has them."""

    cache_threshold_percent: int = key(
        "the least share of the prompt that a worker must hold to be preferred for it, in percent",
        30,
    )
    balance_abs_requests: int = key(
        "requests that the busiest worker has more than the idlest, before load alone decides", 64
    )
    balance_rel_percent: int = key(
        "and how many times as many it has, in percent: 150 is half as many again", 150
    )


@dataclass(frozen=True, slots=True)
class PrefixCache:
    """The knobs of policy `prefix_cache`, as AIBrix has them."""

    imbalance_requests: int = key(
        "requests that the busiest worker has more than the idlest, before load alone decides", 8
    )
    sigma_percent: int = key(
        "how far above the mean number of requests a worker with a match may be, in percent of the"
        " standard deviation",
        100,
    )


@dataclass(frozen=True, slots=True)
class Policy:
    """How a worker is picked."""

    name: str = key("the rule by which a worker is picked", "cost", choices=POLICIES)
    header: str | None = key(
        "a request header that may name another rule; none is read where this is left out", None
    )
    endpoints: int | None = key(
        "how many endpoints are named to the proxy at most, best first: it retries on the next one."
        " Where it is left out, 3 in the buffered dialect and 1 in the Endpoint Picker Protocol,"
        " most of whose gateways refuse a list (Istio accepts it)",
        None,
        minimum=1,
        maximum=8,
    )
    rank_header: str | None = key(
        "a request header that names the data-parallel rank which holds most of the prompt, to"
        " workers whose ranks share one HTTP port. auto: X-data-parallel-rank, where every worker"
        " with several ranks told them itself (events: auto); none is set with null, and then only"
        " what all ranks of a worker hold is certain",
        "auto",
    )
    block_size: int = key(
        "tokens in a cache block, where neither events nor the worker's key tell; of what was sent"
        " to a worker, whole blocks are expected there",
        16,
        minimum=1,
    )
    cost: Cost = key("the weights of cost", Cost)
    cache_aware: CacheAware = key("the knobs of cache_aware", CacheAware)
    prefix_cache: PrefixCache = key("the knobs of prefix_cache", PrefixCache)
    speculative_ms: int = key(
        "milliseconds for which blocks of a request under way are expected on its worker", 60_000
    )
    approximate_ms: int = key(
        "milliseconds for which a worker without events is expected to hold what was sent there",
        600_000,
    )
    sent_bytes: int = key(
        "memory for what was sent where, in bytes; about 160 for each of some 40 marks of a prompt"
        " of 8k tokens",
        64 * 1024 * 1024,
        minimum=1024,
    )
    scrape_interval_ms: int = key(
        "milliseconds between two reads of each worker's /metrics; 0 reads none: the router's own"
        " count is enough where it is the only one",
        0,
    )
    probe_interval_ms: int | None = key(
        "milliseconds between two GET /health of each worker; what fails two in a row is left out"
        " until it answers one with 2xx. Where this is left out, a worker is asked only while there"
        " is reason to doubt it: its feed is lost, its answers fail, or it gives no sign of life"
        " with requests under way; 0 asks none",
        None,
    )
    max_in_flight: int | None = key(
        "requests in flight above which a worker is picked only if all are", None, minimum=1
    )
    shed: bool = key("true: 429 where all are above max_in_flight", default=False)
    refuse: bool = key("true: 503 where no worker may answer a request", default=False)
