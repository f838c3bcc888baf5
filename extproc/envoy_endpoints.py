"""The workers' addresses as Envoy reads them from a file (file-based EDS): one cluster a file.

Source: envoy.service.discovery.v3.DiscoveryResponse with one
envoy.config.endpoint.v3.ClusterLoadAssignment, as JSON. It is written here without their classes,
which take a second and a half for a thousand workers.
"""

import json
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from extproc import address

_TYPE = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"


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
    """The text of a cluster's file, a line a lane; the same lanes always give the same text."""
    members = ",\n".join([json.dumps(_member(lane)) for lane in sorted(set(lanes))])
    kind, name = json.dumps(_TYPE), json.dumps(cluster)
    return (
        f'{{"resources": [{{"@type": {kind}, "cluster_name": {name},'
        f' "endpoints": [{{"lb_endpoints": [\n{members}\n]}}]}}]}}\n'
    )


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


def _member(lane: Lane) -> dict[str, typing.Any]:
    host, port = address.parse(lane.endpoint)
    place = {"socket_address": {"address": host, "port_value": port}}
    member: dict[str, typing.Any] = {"endpoint": {"address": place}}
    if not lane.is_open:
        # left out of Envoy's own choice unless too few others are left (panic mode)
        member["health_status"] = "DRAINING"
    return member
