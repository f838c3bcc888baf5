from dataclasses import replace

import pytest

from extproc.config import Admin, Config, Envoy, ExtProc, Metrics, RouterTls, Tls
from extproc.config.rules import listener_faults

PLAIN = Config()
MUTUAL = Tls(certificate="c", key="k", client_ca="a")


def faults(**sections: object) -> list[str]:
    return list(listener_faults(replace(PLAIN, **sections)))  # type: ignore[arg-type]


def test_what_nobody_wrote_is_sound() -> None:
    assert faults() == []


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (ExtProc("x"), "extproc.listen: must be host:port, is 'x'"),
        (ExtProc("unix:"), "extproc.listen: unix: needs a path"),
        (ExtProc("unix://"), "extproc.listen: unix: needs a path"),
        (
            ExtProc("/run/x.sock"),
            (
                "extproc.listen: must be host:port or unix:PATH, is '/run/x.sock'; did you mean"
                " unix:/run/x.sock?"
            ),
        ),
        (ExtProc(socket_mode="rw"), "extproc.socket_mode: must be as \"0660\", is 'rw'"),
        (
            ExtProc("unix:/x", tls=MUTUAL),
            "extproc.tls: is for host:port; extproc.socket_mode says who may use a Unix socket",
        ),
        (
            ExtProc("unix:/" + 107 * "x"),
            "extproc.listen: a socket's path has 107 bytes at the most, this one 108",
        ),
    ],
)
def test_the_routers_own_listener_is_sound(options: ExtProc, fault: str) -> None:
    assert faults(extproc=options) == [fault]


def test_the_longest_path_of_a_socket_is_taken() -> None:
    assert faults(extproc=ExtProc("unix:///" + 106 * "x")) == []


def test_envoy_listens_on_an_ip_address() -> None:
    said = "must be an IP address and a port: Envoy listens on no name: 'name:1'"
    assert faults(envoy=Envoy(listen="name:1")) == [f"envoy.listen: {said}"]
    assert faults(envoy=Envoy(listen="localhost:1", router="unix:x")) == []


def test_a_client_certificate_that_is_asked_for_is_given() -> None:
    said = "envoy.router_tls: needs certificate and key: extproc.tls.client_ca asks for them"
    asks = ExtProc(tls=MUTUAL)
    assert faults(extproc=asks, envoy=Envoy(router_tls=RouterTls("ca"))) == [said]
    given = RouterTls("ca", certificate="c", key="k")
    assert faults(extproc=asks, envoy=Envoy(router_tls=given)) == []
    assert faults(extproc=asks) == []  # of another configuration of Envoy's nothing is known
    anybody = ExtProc(tls=replace(MUTUAL, client_ca=None))
    assert faults(extproc=anybody, envoy=Envoy(router_tls=RouterTls("ca"))) == []
    half = Envoy(router_tls=RouterTls("ca", certificate="c"))
    assert faults(envoy=half) == ["envoy.router_tls: certificate and key belong together"]


@pytest.mark.parametrize("other", ["127.0.0.1:9091", "localhost:9091", "0.0.0.0:9091"])
def test_an_address_is_given_away_once(other: str) -> None:
    said = f"metrics.listen: 127.0.0.1:9091 is taken: admin.listen is {other}"
    assert faults(admin=Admin(other)) == [said]


@pytest.mark.parametrize("other", ["[::]:9091", "127.0.0.2:9091", "a:9091", "127.0.0.1:9092"])
def test_another_address_is_free(other: str) -> None:
    assert faults(admin=Admin(other)) == []


def test_any_port_is_taken_twice() -> None:
    assert faults(admin=Admin("127.0.0.1:0"), metrics=Metrics("127.0.0.1:0")) == []


def test_envoys_addresses_are_held_against_the_routers_on_one_host() -> None:
    same = Envoy(listen="127.0.0.1:9091", admin="127.0.0.1:9091")
    assert faults(envoy=same) == [
        "envoy.admin: 127.0.0.1:9091 is taken: envoy.listen is 127.0.0.1:9091",
        "envoy.listen: 127.0.0.1:9091 is taken: metrics.listen is 127.0.0.1:9091",
        "envoy.admin: 127.0.0.1:9091 is taken: metrics.listen is 127.0.0.1:9091",
    ]
    elsewhere = Envoy(listen="0.0.0.0:9091", router="router:9002")
    assert faults(envoy=elsewhere) == []


def test_what_nobody_wrote_of_envoy_is_not_held_against_the_router() -> None:
    assert faults(admin=Admin("127.0.0.1:10000")) == []


def test_a_wrong_address_is_told_once() -> None:
    assert faults(admin=Admin("x"), envoy=Envoy(router="y")) == [
        "admin.listen: must be host:port, is 'x'",
        "envoy.router: must be host:port, is 'y'",
    ]
