"""Every fault that the doctor can find, by its code.

A fault's code determines the check that finds it and the fix. docs/internals/faults.md lists the
codes by check; a test compares them.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Fault(NamedTuple):
    """check: the name of the check that finds it. fix: what an operator should do."""

    check: str
    fix: str


class FeedFaults(NamedTuple):
    """The faults of one kind of feed.

    faults: by code. of_nobody: the codes of a port of the engine where nothing listens, as is so of
    all its ports if it does not run. of_answers: the codes of such a port where something answers.
    refused, unreachable: the codes of a connection that is refused, or cannot be made; "" if each
    rank has its own ports, which are examined one by one. shared: the code if another caller takes
    the events, each of which only one gets; "" if all get them.
    """

    faults: Mapping[str, Fault]
    of_nobody: tuple[str, ...] = ()
    of_answers: tuple[str, ...] = ()
    refused: str = ""
    unreachable: str = ""
    shared: str = ""


# By the key of each of `extproc.config.feed_kinds.KINDS`.
OF_FEEDS: Mapping[str, FeedFaults] = {
    "zmq": FeedFaults(
        {
            "feed-nobody-listens": Fault(
                "feed",
                "correct `events.zmq`, turn events on, or have the engine bind (`tcp://*:PORT`)",
            ),
            "feed-not-zmq": Fault(
                "feed",
                "correct the port in `events.zmq` if another server uses it; restart an engine that"
                " hangs",
            ),
            "feed-wrong-socket": Fault(
                "feed",
                "correct the port in `events.zmq`: this may be the replay's, or another rank's",
            ),
            "feed-secured": Fault("feed", "turn ZMQ security off: engines' feeds do not use it"),
            "feed-swapped": Fault(
                "feed", "give each worker the ports of its own feed in `events.zmq`"
            ),
            "rank-missing": Fault(
                "ranks",
                "set `events.ranks` to the engine's data-parallel size; rank r uses both ports + r",
            ),
            "topic-wrong": Fault(
                "topic", "leave `events.topic` empty: it is a prefix, and empty takes all"
            ),
            "replay-unused": Fault(
                "replay", "set `events.replay`: without it, lost messages cannot be recovered"
            ),
            "replay-nobody-listens": Fault(
                "replay",
                "set `replay_endpoint` in the engine's events configuration, or correct the port",
            ),
            "replay-not-zmq": Fault("replay", "correct the port in `events.replay`"),
            "replay-wrong-socket": Fault("replay", "correct the port in `events.replay`"),
            "load-nobody-listens": Fault(
                "load", "start SGLang with `--load-publish-endpoint`, or correct `events.load`"
            ),
            "load-not-zmq": Fault("load", "correct the port in `events.load`"),
            "load-wrong-socket": Fault("load", "correct the port in `events.load`"),
            "replay-swapped": Fault("replay", "give each worker its own port in `events.replay`"),
            "replay-silent": Fault(
                "replay",
                "restart the engine, or correct `events.replay` if the port is another worker's",
            ),
            "replay-truncated": Fault("replay", "restart the engine, or update it"),
        },
        of_nobody=(
            "feed-nobody-listens",
            "rank-missing",
            "replay-nobody-listens",
            "load-nobody-listens",
        ),
        of_answers=(
            "feed-not-zmq",
            "feed-secured",
            "feed-wrong-socket",
            "load-not-zmq",
            "load-wrong-socket",
            "replay-not-zmq",
            "replay-wrong-socket",
        ),
    ),
    "grpc": FeedFaults(
        {
            "grpc-unreachable": Fault(
                "feed", "correct `events.grpc`, or start its server or the bridge"
            ),
            "grpc-unimplemented": Fault(
                "feed",
                "turn events on in the engine, correct `events.service`, or run `kvsteer bridge`",
            ),
        },
        of_nobody=("grpc-unreachable",),
        refused="grpc-unimplemented",
        unreachable="grpc-unreachable",
    ),
    "drain": FeedFaults(
        {
            "drain-refused": Fault(
                "feed",
                "set `event_buffer_max_size` and `enable_block_reuse`, or correct `events.drain`",
            ),
            "drain-shared": Fault(
                "feed", "let one caller drain it: for several routers run `kvsteer bridge --trtllm`"
            ),
        },
        refused="drain-refused",
        unreachable="drain-refused",
        shared="drain-shared",
    ),
}

FAULTS: Mapping[str, Fault] = {
    "not-checked": Fault("time", "raise --timeout, or fix the other findings there first"),
    # workers over HTTP
    "worker-unreachable": Fault(
        "http", "start the engine, or correct `endpoint`; a firewall or network policy may block it"
    ),
    "worker-unhealthy": Fault("http", "read the engine's log; Envoy still sends it requests"),
    "answer-unreadable": Fault(
        "http", "check what listens at this address: no engine answers like this"
    ),
    "model-not-served": Fault(
        "models", "correct `models[].name` or `workers[].model`, or the engine's served model name"
    ),
    "adapter-not-served": Fault(
        "models", "load the adapter in the engine, or take it out of `lora` for this worker"
    ),
    "adapter-not-configured": Fault(
        "models", "add the adapter to `models[].lora`, or unload it from the engine"
    ),
    "prefix-caching-off": Fault(
        "events", "turn prefix caching on: vLLM's --enable-prefix-caching, SGLang's radix cache"
    ),
    "clock-skew": Fault("clock", "synchronize the clocks (NTP): a feed's lag is measured by them"),
    "block-size": Fault(
        "block size", "set `workers[].block_size` to the engine's, or leave it out"
    ),
    "engine-differs": Fault(
        "engine", "correct `workers[].engine`, or leave it out if the worker is right"
    ),
    # feeds
    "events-off": Fault(
        "events", "turn events on in the engine; the engine's page in docs/ has the flags"
    ),
    "events-untold": Fault(
        "events",
        "`events: auto` needs vLLM 0.32 or SGLang: for other engines, name the ports in `events`",
    ),
    "feed-lost": Fault(
        "feed", "read the engine's log; look for too many subscribers, or a proxy in between"
    ),
    "feed-unreadable": Fault(
        "feed", "correct `events`: the messages there are not KV-cache events"
    ),
    "feed-flooded": Fault("feed", "correct `events`: no engine publishes this much"),
    "ranks-miscounted": Fault("ranks", "set `events.ranks` to the engine's data-parallel size"),
    "ranks-mixed-up": Fault("ranks", "correct the ports: each rank's feed has its own port"),
    "feed-silent": Fault(
        "probe",
        "check that prefix caching is on in the engine, and that the feed is this worker's own",
    ),
    "probe-refused": Fault(
        "probe", "read the engine's answer, and see why it refuses a plain completion"
    ),
    "extra-missing": Fault(
        "extra", "run that command in the environment of `kvsteer`, then start the router again"
    ),
    # tokens
    "tokenizer-unloadable": Fault("tokenizer", "correct `models[].tokenizer`, or fetch its files"),
    "tokens-differ": Fault(
        "tokens",
        "point `models[].tokenizer` to the files that the engine was started with, and repeat its"
        " --default-chat-template-kwargs as `models[].chat_template_kwargs`",
    ),
    "tokenizer-refuses": Fault(
        "tokens", "use a local tokenizer: this engine's /tokenize does not accept such requests"
    ),
    "tokenizer-slow": Fault("tokens", "raise `tokenizer.deadline_ms`, or use a local tokenizer"),
    # discovery
    "discovery-fault": Fault(
        "discovery", "correct the source, or its network access and permissions"
    ),
    "no-workers": Fault("discovery", "correct the selector, name or file, or start workers"),
    # TLS of the router itself
    "tls-certificate": Fault(
        "tls",
        "correct `extproc.tls`: readable PEM files, and the key that belongs to the certificate",
    ),
    "tls-expired": Fault("tls", "renew the certificate: new files are loaded without a restart"),
    "tls-client-ca": Fault(
        "tls", "correct `extproc.tls.client_ca`: a readable PEM file with certificates"
    ),
    # sharing with other routers
    "sharing-unreachable": Fault(
        "sharing",
        "start the server at `sharing.url`, or correct the URL, username, password_file or ca",
    ),
    "sharing-unsealed": Fault(
        "sharing", "give all routers the same `sharing.secret_file`, or each fleet its own channel"
    ),
    "routers-share-nothing": Fault(
        "sharing",
        "configure `sharing`, or run one router; docs/several-routers.md has what two cost",
    ),
    # whether requests are steered now
    "router-down": Fault(
        "steering",
        "start the router with `kvsteer serve`, and read its log if it ends; on another machine,"
        " run the doctor beside the router",
    ),
    "router-bypassed": Fault(
        "steering",
        "let Envoy reach the router: correct the address and TLS of the router's cluster, and see"
        " whether the router answers within `message_timeout`",
    ),
    "steered-elsewhere": Fault(
        "steering", "see `astray` in `GET /workers`: Envoy sends requests elsewhere than named"
    ),
    # Envoy
    "deletion-cost-forbidden": Fault(
        "discovery",
        "allow the router's service account to patch pods, or leave `deletion_cost` out",
    ),
    "priority-off": Fault(
        "classes",
        "start vLLM with `--scheduling-policy priority`, or SGLang with"
        " `--enable-priority-scheduling`",
    ),
    "priority-inverted": Fault(
        "classes", "start SGLang without `--schedule-low-priority-values-first`"
    ),
    "isolation-secret": Fault(
        "isolation", "correct `isolation.secret_file`: a file with 16 bytes or more"
    ),
    "isolation-engine": Fault(
        "isolation", "update the engine, or name its model in `isolation.share`"
    ),
    "isolation-header": Fault(
        "isolation", "set `isolation.header` in a filter before ext_proc, or correct its name"
    ),
    "isolation-store": Fault("isolation", "take the store away, or use one that keeps salts apart"),
    "pull-ports": Fault(
        "pulls", "give the workers that can pull from each other a `transfer_port`"
    ),
    "pull-engine": Fault("pulls", "leave `transfer_port` out: only vLLM's workers pull"),
    "pull-unseen": Fault(
        "pulls", "give the engines a p2p tier at `transfer_port`, and see their logs"
    ),
    "store-worker": Fault("stores", "name the workers in `stores` as in `workers`"),
    "store-events": Fault("stores", "configure the worker's `events`"),
    "store-engine": Fault("stores", "leave the worker out of `stores[].workers`"),
    "store-media": Fault("stores", "leave out `stores[].media`, or the worker"),
    "store-port": Fault("stores", "correct `stores[].zmq`, or turn the store's events on"),
    "store-silent": Fault(
        "stores",
        "turn the store's events on as docs/optional-features.md says; after a start, wait until"
        " the workers have stored something",
    ),
    "store-unread": Fault(
        "stores", "see whether the engine mounts the store, and lower `stores[].worth_percent`"
    ),
    "store-connector": Fault("stores", "leave the worker out of `stores[].workers`"),
    "envoy-unreadable": Fault("envoy", "correct `envoy.admin`: this is not Envoy's admin server"),
    "envoy-no-ext-proc": Fault(
        "envoy", "add the filter as docs/envoy.md shows, or with `kvsteer envoy --patch`"
    ),
    "envoy-plain-to-tls": Fault(
        "envoy", "give the router's cluster a TLS `transport_socket` (`envoy.router_tls`)"
    ),
    "envoy-tls-to-plain": Fault(
        "envoy", "set `extproc.tls`, or remove `transport_socket` from the router's cluster"
    ),
    "envoy-no-client-certificate": Fault(
        "envoy", "set `envoy.router_tls.certificate` and `key`: Envoy presents them to the router"
    ),
    "envoy-message-timeout": Fault(
        "envoy", "raise ext_proc's `message_timeout` above `extproc.deadline_ms`"
    ),
    "envoy-hold-message-timeout": Fault(
        "envoy",
        "set ext_proc's `max_message_timeout` ten seconds above `policy.hold.bound_seconds`, as"
        " `kvsteer envoy` does",
    ),
    "envoy-hold-limit": Fault(
        "envoy",
        "set it ten seconds above `policy.hold.bound_seconds`, or to 0s; `idle_timeout` of a route"
        " counts instead of `stream_idle_timeout`",
    ),
    "envoy-hold-requests": Fault(
        "envoy",
        "raise `circuit_breakers.thresholds.max_requests` of the router's cluster, as `kvsteer"
        " envoy` does, or lower `policy.hold.max_requests`",
    ),
    "envoy-fallback": Fault(
        "envoy",
        "make the cluster's `fallback_policy` a ring hash, as `kvsteer envoy` does, or set"
        " `envoy.fallback: least_request`",
    ),
    "envoy-fails-closed": Fault("envoy", "set `failure_mode_allow: true` in ext_proc"),
    "envoy-fails-open": Fault(
        "envoy", "set `failure_mode_allow: false` in ext_proc, or `isolation.fail: open`"
    ),
    "envoy-body-mode": Fault(
        "envoy", "set `request_body_mode: BUFFERED` (or FULL_DUPLEX_STREAMED) in ext_proc"
    ),
    "envoy-mode-override": Fault("envoy", "set `allow_mode_override: true` in ext_proc"),
    "envoy-namespaces": Fault(
        "envoy", "set ext_proc's `metadata_options.receiving_namespaces.untyped: [envoy.lb]`"
    ),
    "envoy-path": Fault("envoy", "set `normalize_path: true` in the HttpConnectionManager"),
    "envoy-path-rewritten": Fault(
        "envoy", "set `extproc.path_prefixes` as it says, so that the router recognizes requests"
    ),
    "envoy-client-header": Fault(
        "envoy", "remove x-gateway-destination-endpoint by `early_header_mutation_extensions`"
    ),
    "envoy-buffer-limit": Fault(
        "envoy", "raise `request_body_buffer_limit` to `extproc.max_body_bytes` or above"
    ),
    "envoy-worker-missing": Fault(
        "envoy", "add the worker to the cluster, or let Envoy follow `envoy.eds_directory`"
    ),
    "envoy-host-unknown": Fault(
        "envoy",
        "add the host to `workers`, or remove it from the cluster: the router does not pick it",
    ),
    "envoy-router-place": Fault(
        "envoy", "correct the address in the router's cluster, `extproc.listen` or `envoy.router`"
    ),
    "envoy-router-unreachable": Fault(
        "envoy",
        "start the router, send a request and check again; or let `extproc.listen` and"
        " `envoy.router` name an address that Envoy reaches: in a container 127.0.0.1 is that"
        " container alone",
    ),
    "envoy-router-protocol": Fault(
        "envoy", "give the router's cluster `http2_protocol_options` (HttpProtocolOptions)"
    ),
    "envoy-route-disabled": Fault(
        "envoy", "remove ExtProcPerRoute `disabled: true` from the routes to the workers"
    ),
    "envoy-route-timeout": Fault("envoy", "set `timeout: 0s` on the routes to the workers"),
    "envoy-no-retries": Fault(
        "envoy", "set the `retry_policy` of envoy/envoy.yaml on the workers' routes or virtual host"
    ),
    "envoy-response-headers": Fault(
        "envoy", "set `response_header_mode: SEND` in ext_proc, or `accounting.responses: none`"
    ),
    "envoy-no-override": Fault(
        "envoy", "give the workers' cluster the load balancing policy override_host"
    ),
    **{code: fault for kind in OF_FEEDS.values() for code, fault in kind.faults.items()},
}
