"""The envoy.yaml for a configuration: what `kvsteer envoy --config FILE` prints.

Built from envoy-data-plane's messages, so that a misspelt field fails here and not in Envoy;
envoy/envoy.yaml is the same, for one example, with the reasons beside each setting.
"""

import typing
from datetime import timedelta

import betterproto2
import yaml
from envoy_data_plane.envoy.config.bootstrap import v3 as bootstrap
from envoy_data_plane.envoy.config.common.mutation_rules import v3 as mutation_rules
from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.config.listener import v3 as listener
from envoy_data_plane.envoy.config.route import v3 as route
from envoy_data_plane.envoy.extensions.filters.http.ext_proc import v3 as ext_proc
from envoy_data_plane.envoy.extensions.filters.http.lua import v3 as lua
from envoy_data_plane.envoy.extensions.filters.http.router import v3 as router
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager import (
    v3 as connection_manager,
)
from envoy_data_plane.envoy.extensions.http.early_header_mutation.header_mutation import (
    v3 as early_header_mutation,
)
from envoy_data_plane.envoy.extensions.retry.host.previous_hosts import v3 as previous_hosts
from envoy_data_plane.envoy.type.matcher import v3 as matcher
from envoy_data_plane.google.protobuf import Any

from extproc.config import Config
from extproc.envoy_clusters import (
    BOUND,
    ROUTER,
    cluster_names,
    router_cluster,
    socket,
    worker_clusters,
)
from extproc.errors import ConfigError
from extproc.headers import DESTINATION, DESTINATION_NAMESPACE, MODEL, UPSTREAM

HEADING = """\
# A complete Envoy configuration for this KVSteer configuration. Run it with: envoy -c FILE
# envoy/envoy.yaml in KVSteer's sources says why each setting is there. Needs Envoy 1.35 or newer.
#
# If you add routes that do not lead to these workers, switch the filter off for each of them:
#   typed_per_filter_config:
#     envoy.filters.http.ext_proc:
#       "@type": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute
#       disabled: true
"""

NO_LIMIT = timedelta(0)

_MODEL_FINDER = """\
local known = {{{table}}}
function envoy_on_request(handle)
  if handle:headers():get("{header}") then return end
  local body = handle:body()
  if not body then return end
  local text = body:getBytes(0, body:length())
  for name in text:gmatch('"model"%s*:%s*"([^"]*)"') do
    if known[name] then
      handle:headers():replace("{header}", known[name])
      handle:clearRouteCache()
      return
    end
  end
end
"""


def render(config: Config) -> str:
    """A complete envoy.yaml that steers by what `kvsteer serve` with this configuration answers.

    The same configuration always gives the same text.

    Raises:
        ConfigError: the router serves TLS, and it is not said how Envoy is to check it.
    """
    if config.extproc.tls is not None and config.envoy.router_tls is None:
        raise ConfigError(["envoy.router_tls: missing: the router serves TLS (extproc.tls)"])
    # Fields keep their own names: betterproto2's snake case makes consecutive_5_xx of one of them.
    tree = _bootstrap(config).to_dict(casing=typing.cast("typing.Any", str))
    return HEADING + yaml.safe_dump(tree, sort_keys=False)


def _bootstrap(config: Config) -> bootstrap.Bootstrap:
    # Envoy reads no file of endpoints without a name of its own.
    node = core.Node(id="kvsteer", cluster="kvsteer") if config.envoy.eds_directory else None
    return bootstrap.Bootstrap(
        node=node,
        admin=bootstrap.Admin(address=socket(config.envoy.admin, BOUND)),
        static_resources=bootstrap.BootstrapStaticResources(
            listeners=[_listener(config)],
            clusters=[*worker_clusters(config), router_cluster(config)],
        ),
    )


def _listener(config: Config) -> listener.Listener:
    http = listener.Filter(
        name="envoy.filters.network.http_connection_manager",
        typed_config=Any.pack(_connection_manager(config)),
    )
    return listener.Listener(
        name="clients",
        address=socket(config.envoy.listen, BOUND),
        filter_chains=[listener.FilterChain(filters=[http])],
    )


def _connection_manager(config: Config) -> connection_manager.HttpConnectionManager:
    filters: dict[str, betterproto2.Message] = {"envoy.filters.http.ext_proc": _ext_proc(config)}
    if len(config.models) > 1:
        filters["envoy.filters.http.lua"] = _model_finder(config)
    filters["envoy.filters.http.router"] = router.Router()
    return connection_manager.HttpConnectionManager(
        stat_prefix="clients",
        # An engine may think for minutes before its first token; its own limits apply.
        stream_idle_timeout=NO_LIMIT,
        early_header_mutation_extensions=[_client_headers_removed()],
        route_config=route.RouteConfiguration(
            name="clients", virtual_hosts=[_virtual_host(config)]
        ),
        http_filters=[
            connection_manager.HttpFilter(name=name, typed_config=Any.pack(message))
            for name, message in filters.items()
        ],
    )


def _client_headers_removed() -> core.TypedExtensionConfig:
    """Early, so that a client steers nothing even while the router is away."""
    mutations = [mutation_rules.HeaderMutation(remove=name) for name in (DESTINATION, MODEL)]
    return core.TypedExtensionConfig(
        name="envoy.http.early_header_mutation.header_mutation",
        typed_config=Any.pack(early_header_mutation.HeaderMutation(mutations=mutations)),
    )


def _ext_proc(config: Config) -> ext_proc.ExternalProcessor:
    headers, bodies = ext_proc.ProcessingModeHeaderSendMode, ext_proc.ProcessingModeBodySendMode
    namespaces = ext_proc.MetadataOptionsMetadataNamespaces(untyped=[DESTINATION_NAMESPACE])
    options = ext_proc.MetadataOptions(receiving_namespaces=namespaces)
    reads_responses = config.accounting.responses != "none"
    if reads_responses:  # the cluster writes there which worker answered
        options.forwarding_namespaces = namespaces
    return ext_proc.ExternalProcessor(
        grpc_service=core.GrpcService(envoy_grpc=core.GrpcServiceEnvoyGrpc(cluster_name=ROUTER)),
        failure_mode_allow=True,
        message_timeout=timedelta(milliseconds=config.envoy.message_timeout_ms),
        processing_mode=ext_proc.ProcessingMode(
            request_header_mode=headers.SEND,
            request_body_mode=bodies.BUFFERED,
            response_header_mode=headers.SEND if reads_responses else headers.SKIP,
            # Where a body is to be read, the answer to its headers says so.
            response_body_mode=bodies.NONE,
            request_trailer_mode=headers.SKIP,
            # Keeps the stream open until the response ends, which is how load is counted.
            response_trailer_mode=headers.SEND,
        ),
        allow_mode_override=True,
        metadata_options=options,
        response_attributes=[UPSTREAM],  # of the responses that are looked at
    )


def _model_finder(config: Config) -> lua.Lua:
    """Names the model where the router did not: it is away, or has not read the body.

    Without it all would go to the first model's workers, which refuse another model's name. A
    string within a string has its quotes escaped, so only keys are found.
    """
    known = {
        name: model.name
        for model in config.models
        for name in (model.name, *model.aliases, *model.lora)
    }
    table = ", ".join(f"[{_lua(name)}] = {_lua(model)}" for name, model in known.items())
    code = _MODEL_FINDER.format(table=table, header=MODEL)
    return lua.Lua(default_source_code=core.DataSource(inline_string=code))


def _lua(text: str) -> str:
    """A string of Lua 5.1, byte by byte where it is not plain."""
    plain = "".join(
        chr(byte) if chr(byte).isascii() and chr(byte).isalnum() else f"\\{byte:03d}"
        for byte in text.encode()
    )
    return f'"{plain}"'


def _virtual_host(config: Config) -> route.VirtualHost:
    return route.VirtualHost(
        name="inference",
        domains=["*"],
        routes=_routes(config),
        retry_policy=_retry_policy(),
        request_body_buffer_limit=config.envoy.request_body_buffer_limit_bytes,
    )


def _routes(config: Config) -> list[route.Route]:
    """A route for each model, if there are several, and the first model's for all the rest.

    The last one takes over while the router is away or does not know the model.
    """
    clusters = cluster_names(model.name for model in config.models)
    default = _route(next(iter(clusters.values())), [])
    if len(clusters) == 1:
        return [default]
    return [*(_route(name, [_is_model(model)]) for model, name in clusters.items()), default]


def _route(cluster: str, headers: list[route.HeaderMatcher]) -> route.Route:
    return route.Route(
        match=route.RouteMatch(prefix="/", headers=headers),
        route=route.RouteAction(cluster=cluster, timeout=NO_LIMIT),
    )


def _is_model(model: str) -> route.HeaderMatcher:
    return route.HeaderMatcher(name=MODEL, string_match=matcher.StringMatcher(exact=model))


def _retry_policy() -> route.RetryPolicy:
    """Walks the list of picks; override_host looks at no host's health, so this saves a request.

    Only where no byte of the request has reached the worker: nothing is generated twice.
    """
    other_host = route.RetryPolicyRetryHostPredicate(
        name="envoy.retry_host_predicates.previous_hosts",
        typed_config=Any.pack(previous_hosts.PreviousHostsPredicate()),
    )
    return route.RetryPolicy(
        retry_on="connect-failure,refused-stream,reset-before-request",
        num_retries=3,
        retry_host_predicate=[other_host],
        # A dead host has nothing in flight, so the fallback draws it again and again.
        host_selection_retry_max_attempts=16,
        retry_back_off=route.RetryPolicyRetryBackOff(
            base_interval=timedelta(milliseconds=1), max_interval=timedelta(milliseconds=10)
        ),
    )
