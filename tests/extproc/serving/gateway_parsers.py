"""How gateways read the header that names endpoints, each as strictly as the gateway itself.

All of them speak the Endpoint Picker Protocol. Every parser returns the endpoints that its
gateway would try, in order, or raises ValueError if the gateway fails the request.
"""

import ipaddress
import re
from collections.abc import Callable, Mapping

MAX_PORT = 65_535


def nginx_gateway_fabric(value: str) -> list[str]:
    """`proxy_pass http://$inference_workload_endpoint`: one host and one port.

    nginx 1.22, ngx_parse_inet_url and ngx_parse_inet6_url: the port is what follows the first colon
    (for IPv6, the bracket) up to a slash or a question mark, and consists of digits only.
    """
    found = re.match(r"(\[[^]]*\]|[^:/?]+)(?::([^/?]*))?", value)
    if found is None:
        raise ValueError("no host in upstream")
    port = found[2]
    if port is None or not re.fullmatch("[0-9]+", port) or not 0 < int(port) <= MAX_PORT:
        raise ValueError("invalid port in upstream")
    return [found[0]]


def envoy_ai_gateway(value: str) -> list[str]:
    """An ORIGINAL_DST cluster with `http_header_name`: one IP address and one port.

    Envoy 1.40, Utility::parseInternetAddressAndPortNoThrow; anything else is a 503, and is counted
    in original_dst_host_invalid.
    """
    return [_ip_and_port(value)]


def agentgateway(value: str) -> list[str]:
    """`value.parse::<SocketAddr>()`: one IP address and one port, else a 503."""
    return [_ip_and_port(value)]


def istio(value: str) -> list[str]:
    """The `override_host` policy of its Envoy: a list separated by commas."""
    return [_ip_and_port(one.strip()) for one in value.split(",")]


def _ip_and_port(text: str) -> str:
    host, colon, port = text.rpartition(":")
    if not colon or not re.fullmatch("[0-9]{1,5}", port) or int(port) > MAX_PORT:
        raise ValueError(f"no port: {text!r}")
    if host.startswith("[") and host.endswith("]"):
        ipaddress.IPv6Address(host[1:-1])
    else:
        ipaddress.IPv4Address(host)
    return text


GATEWAYS: Mapping[str, Callable[[str], list[str]]] = {
    "nginx-gateway-fabric": nginx_gateway_fabric,
    "envoy-ai-gateway": envoy_ai_gateway,
    "agentgateway": agentgateway,
    "istio": istio,
}
