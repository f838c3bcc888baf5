"""The manifests of deploy/kubernetes as an Envoy that their controllers would configure."""

import copy

from tests.deploy.manifests import of_kind
from tests.system.ingresses.existing_envoy import Tree, connection_manager, load_assignment

_EXTENSIONS = "type.googleapis.com/envoy.extensions"
_HTTP2 = {
    "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
        "@type": f"{_EXTENSIONS}.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
}


def router_cluster(name: str, port: int) -> Tree:
    """The router's Service as a cluster."""
    return {
        "name": name,
        "type": "STATIC",
        "load_assignment": load_assignment(name, [f"127.0.0.1:{port}"]),
        "typed_extension_protocol_options": _HTTP2,
    }


# ---- Istio: the EnvoyFilter's patches ----------------------------------------------------------


def istio(envoy: Tree, router_port: int) -> Tree:
    """Applies the patches as Istio does, to the configuration that it generates."""
    (policy,) = of_kind("istio-envoyfilter", "EnvoyFilter")
    (engines,) = envoy["static_resources"]["clusters"]
    manager = connection_manager(envoy)
    (host,) = manager["route_config"]["virtual_hosts"]
    (route,) = host["routes"]
    # Istio writes its own retry policy on every route.
    route["route"]["retry_policy"] = {"retry_on": "connect-failure", "num_retries": 2}
    (http,) = envoy["static_resources"]["listeners"][0]["filter_chains"][0]["filters"]
    targets = {
        "NETWORK_FILTER": http, "VIRTUAL_HOST": host, "HTTP_ROUTE": route, "CLUSTER": engines,
    }  # fmt: skip
    for one in policy["spec"]["configPatches"]:
        value, operation = copy.deepcopy(one["patch"]["value"]), one["patch"]["operation"]
        if one["applyTo"] == "HTTP_FILTER":
            assert operation == "INSERT_BEFORE"
            manager["http_filters"].insert(0, value)
        else:
            assert operation == "MERGE"
            merge(targets[one["applyTo"]], value)
    name = manager["http_filters"][0]["typed_config"]["grpc_service"]["envoy_grpc"]["cluster_name"]
    envoy["static_resources"]["clusters"].append(router_cluster(name, router_port))
    return envoy


def merge(tree: Tree, other: Tree) -> None:
    """Merges as protobuf does: messages field by field, lists one after the other."""
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            merge(tree[key], value)
        elif isinstance(value, list):
            tree[key] = [*tree.get(key, []), *value]
        else:
            tree[key] = value


# ---- Envoy Gateway: its policies, as version 1.9 translates them ------------------------------


def envoy_gateway(envoy: Tree, router_port: int) -> Tree:
    """The three policies as Envoy Gateway's translator applies them."""
    (clients,) = of_kind("envoy-gateway", "ClientTrafficPolicy")
    (backends,) = of_kind("envoy-gateway", "BackendTrafficPolicy")
    (extension,) = of_kind("envoy-gateway", "EnvoyExtensionPolicy")
    (listener,) = envoy["static_resources"]["listeners"]
    limit = clients["spec"]["connection"]["bufferLimit"].removesuffix("Mi")
    listener["per_connection_buffer_limit_bytes"] = int(limit) * 1024 * 1024
    manager = connection_manager(envoy)
    removed = clients["spec"]["headers"]["earlyRequestHeaders"]["remove"]
    manager["early_header_mutation_extensions"] = [_early_removal(removed)]
    (extproc,) = extension["spec"]["extProc"]
    manager["http_filters"].insert(0, _ext_proc(extproc))
    (engines,) = envoy["static_resources"]["clusters"]
    balancer = backends["spec"]["loadBalancer"]
    engines["load_balancing_policy"] = _override_by_header(balancer)
    (host,) = manager["route_config"]["virtual_hosts"]
    host["routes"][0]["route"]["retry_policy"] = _retry(backends["spec"]["retry"])
    envoy["static_resources"]["clusters"].append(router_cluster("kvsteer", router_port))
    return envoy


def _early_removal(names: list[str]) -> Tree:
    mutation = f"{_EXTENSIONS}.http.early_header_mutation.header_mutation.v3.HeaderMutation"
    mutations = [{"remove": name} for name in names]
    config = {"@type": mutation, "mutations": mutations}
    return {"name": "envoy.http.early_header_mutation.header_mutation", "typed_config": config}


def _ext_proc(extproc: Tree) -> Tree:
    """Without `response` in the policy's processing mode, no part of the response is sent."""
    mode = extproc["processingMode"]
    assert mode["request"] == {"body": "Buffered"}
    assert "response" not in mode
    config = {
        "@type": f"{_EXTENSIONS}.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "kvsteer"}, "timeout": "10s"},
        "failure_mode_allow": extproc["failOpen"],
        "message_timeout": _seconds(extproc["messageTimeout"]),
        "allow_mode_override": mode["allowModeOverride"],
        "processing_mode": {
            "request_header_mode": "SEND",
            "request_body_mode": "BUFFERED",
            "request_trailer_mode": "SKIP",
            "response_header_mode": "SKIP",
            "response_trailer_mode": "SKIP",
        },
    }
    return {"name": "envoy.filters.http.ext_proc", "typed_config": config}


def _override_by_header(balancer: Tree) -> Tree:
    assert balancer["type"] == "LeastRequest"
    policies = f"{_EXTENSIONS}.load_balancing_policies"
    fallback = {"@type": f"{policies}.least_request.v3.LeastRequest"}
    override = {
        "@type": f"{policies}.override_host.v3.OverrideHost",
        "override_host_sources": balancer["endpointOverride"]["extractFrom"],
        "fallback_policy": _policy("least_request", fallback),
    }
    return _policy("override_host", override)


def _policy(name: str, config: Tree) -> Tree:
    named = {"name": f"envoy.load_balancing_policies.{name}", "typed_config": config}
    return {"policies": [{"typed_extension_config": named}]}


def _retry(retry: Tree) -> Tree:
    back_off = retry["perRetry"]["backOff"]
    return {
        "retry_on": ",".join(retry["retryOn"]["triggers"]),
        "num_retries": retry["numRetries"],
        "retry_back_off": {
            "base_interval": _seconds(back_off["baseInterval"]),
            "max_interval": _seconds(back_off["maxInterval"]),
        },
    }


def _seconds(milliseconds: str) -> str:
    return f"{int(milliseconds.removesuffix('ms')) / 1000}s"
