"""The workers' addresses as Envoy reads them from a file (file-based EDS): one cluster a file."""

import json
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.config.endpoint import v3 as endpoint
from envoy_data_plane.envoy.service.discovery import v3 as discovery
from envoy_data_plane.google.protobuf import Any

from extproc import address


class Lane(NamedTuple):
    """One endpoint of a cluster; is_open: whether Envoy itself may choose it.

    Envoy follows our pick to a closed one all the same, and so do the requests under way.
    """

    endpoint: str
    is_open: bool


def path_of(directory: str, cluster: str) -> str:
    """The file of a cluster."""
    return str(Path(directory) / f"{cluster}.json")


def assignment(cluster: str, lanes: Iterable[Lane]) -> str:
    """The text of a cluster's file; the same endpoints always give the same text."""
    members = [_member(lane) for lane in sorted(set(lanes))]
    load = endpoint.ClusterLoadAssignment(
        cluster_name=cluster, endpoints=[endpoint.LocalityLbEndpoints(lb_endpoints=members)]
    )
    response = discovery.DiscoveryResponse(resources=[Any.pack(load)])
    # as in extproc.envoy_config: fields keep their own names
    tree = response.to_dict(casing=typing.cast("typing.Any", str))
    return json.dumps(tree, indent=1) + "\n"


def lanes_in(text: bytes) -> list[Lane]:
    """The endpoints in a file that `assignment` wrote; none if it is no such file."""
    try:
        (load,) = json.loads(text)["resources"]
        return [_lane_in(member) for member in load["endpoints"][0].get("lb_endpoints", [])]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return []


def _lane_in(member: typing.Any) -> Lane:  # noqa: ANN401 - decoded JSON
    place = member["endpoint"]["address"]["socket_address"]
    parsed = address.parse(str(address.Address(place["address"], int(place["port_value"]))))
    if not parsed.is_ip:
        raise ValueError("is no IP address")
    return Lane(str(parsed), "health_status" not in member)


def _member(lane: Lane) -> endpoint.LbEndpoint:
    host, port = address.parse(lane.endpoint)
    place = core.Address(socket_address=core.SocketAddress(address=host, port_value=port))
    # DRAINING: left out of Envoy's own choice unless too few others are left (panic mode)
    health = core.HealthStatus.UNKNOWN if lane.is_open else core.HealthStatus.DRAINING
    return endpoint.LbEndpoint(endpoint=endpoint.Endpoint(address=place), health_status=health)
