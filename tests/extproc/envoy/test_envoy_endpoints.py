import json

import pytest
from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.config.endpoint import v3 as endpoint
from envoy_data_plane.google.protobuf import Any

from extproc.envoy.endpoint_files import Lane, assignment, lanes_in, path_of

ONE, TWO = Lane("10.0.0.1:8000", is_open=True), Lane("[fd00::2]:8000", is_open=False)


def test_assignment_is_readable_by_envoy() -> None:
    (load,) = json.loads(assignment("workers", [TWO, ONE, ONE]))["resources"]
    kind = Any.pack(endpoint.ClusterLoadAssignment(cluster_name="workers")).type_url
    assert load.pop("@type") == kind
    read = endpoint.ClusterLoadAssignment.from_dict(load)
    assert read.cluster_name == "workers"
    first, second = read.endpoints[0].lb_endpoints
    place = core.SocketAddress(address="10.0.0.1", port_value=8000)
    assert first.endpoint == endpoint.Endpoint(address=core.Address(socket_address=place))
    assert (first.health_status.name, second.health_status.name) == ("UNKNOWN", "DRAINING")


def test_assignment_does_not_depend_on_the_order_of_lanes() -> None:
    assert assignment("workers", [ONE, TWO]) == assignment("workers", [TWO, ONE, TWO])


def test_lanes_in_inverts_assignment() -> None:
    assert lanes_in(assignment("workers", [ONE, TWO]).encode()) == [ONE, TWO]
    assert lanes_in(assignment("workers", []).encode()) == []


def test_path_of_lies_in_the_directory() -> None:
    assert path_of("/run/kvsteer/", "workers-a") == "/run/kvsteer/workers-a.json"


@pytest.mark.parametrize(
    "text",
    [
        b"", b"[]", b"{}", b'{"resources": [{}]}', b'{"resources": [{"endpoints": []}]}', b"\xff",
        assignment("w", [ONE]).replace("10.0.0.1", "name").encode(),
        assignment("w", [ONE]).replace('"10.0.0.1"', "7").encode(),
    ],
)  # fmt: skip
def test_lanes_in_is_empty_for_another_file(text: bytes) -> None:
    assert lanes_in(text) == []
