import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.base.address import (
    PORT_STEP,
    Address,
    Rendezvous,
    nth,
    parse,
    parse_http,
    parse_rendezvous,
    parse_tcp,
    same_place,
    with_host,
)
from extproc.config.schema import Admin, ExtProc, MetricsSettings


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("127.0.0.1:80", Address("127.0.0.1", 80)),
        ("worker-1:8000", Address("worker-1", 8000)),
        ("[::1]:80", Address("::1", 80)),
        ("[0:0::1]:80", Address("::1", 80)),
    ],
)
def test_parse_splits_host_and_port(text: str, place: Address) -> None:
    assert parse(text) == place


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        "host:",
        "host:x",
        "host:65536",
        ":80",
        "::1:80",
        "[host]:80",
        "a b:1",
        "a/b:1",
        "a:٣",
    ],
)
def test_parse_refuses_other_than_an_address(text: str) -> None:
    with pytest.raises(ValueError, match=r"host:port|brackets"):
        parse(text)


def test_parse_names_the_fault_of_an_address() -> None:
    with pytest.raises(ValueError, match="must be host:port, without http://, is "):
        parse("http://1.2.3.4:80")
    with pytest.raises(ValueError, match="needs brackets around its IPv6 address"):
        parse("fe80::1:80")
    with pytest.raises(ValueError, match="must be host:port, is 'a:b:1'"):
        parse("a:b:1")


def test_address_is_written_as_it_is_read() -> None:
    assert str(parse("[::1]:80")) == "[::1]:80"
    assert str(parse("a:1")) == "a:1"


def test_is_ip_distinguishes_names_from_ip_addresses() -> None:
    assert parse("[::1]:80").is_ip
    assert not parse("a:1").is_ip


def test_parse_tcp_reads_zmq_endpoints() -> None:
    assert parse_tcp("tcp://a:1") == Address("a", 1)
    with pytest.raises(ValueError, match="must be tcp://host:port"):
        parse_tcp("ipc:///tmp/x")


def test_parse_http_accepts_a_slash_at_the_end() -> None:
    assert parse_http("http://[::1]:8000/") == Address("::1", 8000)
    assert parse_http("http://w:1") == Address("w", 1)


@pytest.mark.parametrize("text", ["https://a:1", "a:1", "http://a", "http://a:1/path"])
def test_parse_http_refuses_other_urls(text: str) -> None:
    with pytest.raises(ValueError, match="must be h"):
        parse_http(text)


def test_nth_gives_each_process_an_address_of_its_own() -> None:
    assert [nth("[::1]:80", number) for number in range(3)] == ["[::1]:80", "[::1]:90", "[::1]:100"]
    assert [nth("unix:/a", number) for number in range(2)] == ["unix:/a", "unix:/a.1"]
    with pytest.raises(ValueError, match="has no port for process 1: 65536 is above 65535"):
        nth("a:65526", 1)


@pytest.mark.parametrize(
    ("text", "rendezvous"),
    [
        ("valkey://engine", Rendezvous(Address("engine", 6379))),
        ("redis://10.0.0.1:7000/0", Rendezvous(Address("10.0.0.1", 7000))),
        ("rediss://[::1]:7000", Rendezvous(Address("::1", 7000), is_tls=True)),
        ("valkeys://[::1]", Rendezvous(Address("::1", 6379), is_tls=True)),
        ("unix:///run/engine.sock", Rendezvous(socket="/run/engine.sock")),
        ("directory:/run/kvsteer", Rendezvous(directory="/run/kvsteer")),
    ],
)
def test_parse_meeting_reads_every_kind_of_url(text: str, rendezvous: Rendezvous) -> None:
    assert parse_rendezvous(text) == rendezvous
    assert str(rendezvous) in str(rendezvous.engine or text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("http://a:1", "must be valkey://"),
        ("a:1", "must be valkey://"),
        ("redis://user:secret@a:1", "must not hold a user or password"),
        ("redis://a:1/3", "names a database"),
        ("redis://a:65536", "host:port"),
        ("unix://relative", "an absolute path"),
        ("directory:relative", "an absolute path"),
    ],
)
def test_parse_meeting_refuses_other_urls(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_rendezvous(text)


@given(st.sets(st.integers(1024, 60_000), max_size=4), st.integers(1, 64))
def test_ports_of_different_last_digits_do_not_collide_in_any_process(
    ports: set[int], processes: int
) -> None:
    distinct = {port % PORT_STEP: port for port in ports}.values()
    taken = [nth(f"a:{port}", number) for port in distinct for number in range(processes)]
    assert len(set(taken)) == len(taken)


def test_default_ports_have_different_last_digits() -> None:
    ports = [parse(one.listen).port for one in (ExtProc(), Admin(), MetricsSettings())]
    assert len({port % PORT_STEP for port in ports}) == len(ports)


def test_same_place_is_one_spelling_of_a_host() -> None:
    assert same_place(Address("A.test", 1)) == same_place(Address("a.test", 1))
    assert same_place(Address("localhost", 1)) == Address("127.0.0.1", 1)


@pytest.mark.parametrize(
    ("endpoint", "there"),
    [
        ("tcp://W.test:1", "tcp://[fd00::7]:1"),
        ("w.test:1", "[fd00::7]:1"),
        ("http://w.test:1/", "http://[fd00::7]:1"),
        ("tcp://other:1", "tcp://other:1"),
        ("ipc://w.test", "ipc://w.test"),
    ],
)
def test_with_host_changes_the_host_that_it_names(endpoint: str, there: str) -> None:
    assert with_host(endpoint, "w.test", "fd00::7") == there
