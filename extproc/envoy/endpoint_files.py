"""The files from which Envoy reads the workers' addresses, one for each cluster.

File-based EDS: envoy.service.discovery.v3.DiscoveryResponse with one
envoy.config.endpoint.v3.ClusterLoadAssignment, as JSON. They are written without envoy-data-plane's
classes, which take a second and a half for a thousand workers.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from extproc.base import address
from extproc.config.sections import PREFILL

WORKERS = "workers"


def cluster_names(models: Iterable[str]) -> dict[str, str]:
    """Returns the cluster of each model: `workers` for a single one, else `workers-<model>`.

    A dot or a slash would split names in Envoy's statistics, so only letters, digits, `_` and `-`
    are kept; a number is added if two names would then be the same.
    """
    models = list(models)
    if len(models) == 1:
        return {models[0]: WORKERS}
    names: dict[str, str] = {}
    for model in models:
        safe = f"{WORKERS}-" + re.sub(r"[^A-Za-z0-9_-]+", "-", model)
        taken, name, number = set(names.values()), safe, 2
        while name in taken:
            name, number = f"{safe}-{number}", number + 1
        names[model] = name
    return names


_TYPE = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"


def prefill_cluster(workers: str) -> str:
    """Returns the name of the prefill workers' cluster that belongs to a cluster of workers."""
    return f"{PREFILL}{workers.removeprefix(WORKERS)}"


class Lane(NamedTuple):
    """One endpoint of a cluster; is_open: whether Envoy itself may choose it.

    Envoy still follows a pick to a closed endpoint, and requests in flight there continue.
    """

    endpoint: str
    is_open: bool


def path_of(directory: str, cluster: str) -> str:
    """Returns the name of a cluster's file in a directory."""
    return str(Path(directory) / f"{cluster}.json")


def assignment(cluster: str, lanes: Iterable[Lane]) -> str:
    """Returns the text of a cluster's file, one line for each lane, in a stable order."""
    members = ",\n".join([json.dumps(_member(lane)) for lane in sorted(set(lanes))])
    kind, name = json.dumps(_TYPE), json.dumps(cluster)
    return (
        f'{{"resources": [{{"@type": {kind}, "cluster_name": {name},'
        f' "endpoints": [{{"lb_endpoints": [\n{members}\n]}}]}}]}}\n'
    )


def lanes_in(text: bytes) -> list[Lane]:
    """Returns the lanes in a file that `assignment` wrote; none if it did not write this file."""
    try:
        (load,) = json.loads(text)["resources"]
        return [_lane_in(member) for member in load["endpoints"][0].get("lb_endpoints", [])]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return []


def _lane_in(member: Any) -> Lane:
    place = member["endpoint"]["address"]["socket_address"]
    parsed = address.parse(str(address.Address(place["address"], int(place["port_value"]))))
    if not parsed.is_ip:
        raise ValueError("is no IP address")
    return Lane(str(parsed), "health_status" not in member)


def _member(lane: Lane) -> dict[str, Any]:
    host, port = address.parse(lane.endpoint)
    place = {"socket_address": {"address": host, "port_value": port}}
    member: dict[str, Any] = {"endpoint": {"address": place}}
    if not lane.is_open:
        # Envoy chooses it itself only if too few others are healthy (panic mode)
        member["health_status"] = "DRAINING"
    return member
