"""TLS, as a gRPC client sees it."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc
import pytest

from extproc.pb.kvsteer_health_pb2 import HealthCheckResponse
from extproc.running import event_loop
from extproc.serving.server_bounds import USUAL, ServerBounds
from tests.extproc.messages import body, head
from tests.extproc.serving.identities import NAME, Identities
from tests.extproc.serving.running import PROMPT, Running, listen_at
from tests.waiting import until

SERVING = HealthCheckResponse.SERVING


@pytest.fixture
def identities(tmp_path: Path) -> Identities:
    return Identities(tmp_path)


@contextlib.asynccontextmanager
async def running(
    identities: Identities,
    tmp_path: Path,
    *,
    is_mutual: bool = False,
    bounds: ServerBounds = USUAL,
) -> AsyncIterator[Running]:
    options = identities.options(is_mutual=is_mutual)
    credentials = identities.client() if is_mutual else identities.anybody()
    one = Running(listen_at("tcp", tmp_path), options, credentials, bounds)
    await one.server.start()
    try:
        yield one
    finally:
        await one.stop()


async def shown(one: Running) -> bytes:
    """Returns the certificate that a new connection is shown."""
    host, port = one.listen.split(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    found = writer.get_extra_info("ssl_object")
    assert found.selected_alpn_protocol() == "h2"
    certificate = ssl.DER_cert_to_PEM_cert(found.getpeercert(binary_form=True))
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return certificate.encode()


async def placed(one: Running) -> grpc.aio.StreamStreamCall:
    call = one.process()
    await call.write(head("/v1/completions"))
    await call.read()
    await call.write(body(PROMPT))
    assert (await call.read()).WhichOneof("response") == "request_body"
    return call


@pytest.mark.parametrize("is_mutual", [False, True], ids=["tls", "mtls"])
async def test_request_is_placed_over_tls(
    *, is_mutual: bool, identities: Identities, tmp_path: Path
) -> None:
    async with running(identities, tmp_path, is_mutual=is_mutual) as one:
        call = await placed(one)
        assert one.in_flight == 1
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK
        assert await one.health("readiness") == SERVING


async def test_large_body_is_placed_over_tls(identities: Identities, tmp_path: Path) -> None:
    async with running(identities, tmp_path) as one:
        call = one.process()
        await call.write(head("/v1/completions"))
        await call.read()
        await call.write(body(b'{"model": "m", "prompt": "' + b"x" * 5_000_000 + b'"}'))
        assert (await call.read()).WhichOneof("response") == "request_body"


async def refused(one: Running, credentials: grpc.ChannelCredentials | None) -> None:
    channel = one.connect(credentials)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await one.health("liveness", channel)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    await channel.close()


async def test_client_without_a_valid_certificate_is_refused(
    identities: Identities, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    other = Identities(tmp_path / "other")
    certificate, key = other.issue("envoy.test")
    stranger = grpc.ssl_channel_credentials(identities.ca_pem, key, certificate)
    async with running(identities, tmp_path, is_mutual=True) as one:
        await refused(one, identities.anybody())
        await refused(one, stranger)
        await refused(one, None)
        assert await one.health("liveness") == SERVING


async def test_failed_handshakes_are_all_counted_and_seldom_logged(
    identities: Identities, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "other").mkdir()
    certificate, key = Identities(tmp_path / "other").issue("envoy.test")
    stranger = grpc.ssl_channel_credentials(identities.ca_pem, key, certificate)
    async with running(identities, tmp_path, is_mutual=True) as one:
        assert one.certificates is not None
        await refused(one, identities.anybody())
        assert "handshake failed: PEER_DID_NOT_RETURN_A_CERTIFICATE (1 so far)" in caplog.text
        await refused(one, stranger)
        await refused(one, None)
        count = one.certificates.failed_handshakes
        assert count >= 3
        assert await one.health("liveness") == SERVING
        assert one.server.figures().faults["TLS_HANDSHAKE"] == count
    told = [each for each in caplog.messages if "TLS handshake failed" in each]
    assert len(told) == count.bit_length()


async def test_plain_text_gets_no_answer(identities: Identities, tmp_path: Path) -> None:
    async with running(identities, tmp_path) as one:
        await refused(one, None)
        assert await one.health("liveness") == SERVING


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
async def test_tls_below_1_2_is_refused(identities: Identities, tmp_path: Path) -> None:
    async with running(identities, tmp_path) as one:
        host, port = one.listen.split(":")
        for most, speaks in ((ssl.TLSVersion.TLSv1_1, False), (ssl.TLSVersion.TLSv1_2, True)):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.load_verify_locations(str(identities.ca_file))
            context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
            context.maximum_version = most
            context.set_ciphers("ALL:@SECLEVEL=0")
            context.set_alpn_protocols(["h2"])
            opening = asyncio.open_connection(host, int(port), ssl=context, server_hostname=NAME)
            if speaks:
                _, writer = await opening
                writer.close()
                continue
            with pytest.raises((ssl.SSLError, ConnectionResetError)) as caught:
                await opening
            assert "NO_PROTOCOLS_AVAILABLE" not in str(caught.value)  # refused by the server


@pytest.mark.parametrize("is_mutual", [False, True], ids=["tls", "mtls"])
async def test_renewed_files_serve_new_connections_while_old_streams_continue(
    *, is_mutual: bool, identities: Identities, tmp_path: Path
) -> None:
    async with running(identities, tmp_path, is_mutual=is_mutual) as one:
        call = await placed(one)
        if not is_mutual:
            assert await shown(one) == identities.certificate_file.read_bytes()
        assert one.certificates is not None
        for _ in range(3):
            identities.renew()
            await one.certificates.look()
        if not is_mutual:
            assert await shown(one) == identities.certificate_file.read_bytes()
        fresh = one.connect(identities.client() if is_mutual else identities.anybody())
        assert await one.health("liveness", fresh) == SERVING
        await fresh.close()
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK


async def test_replaced_authority_admits_no_client(identities: Identities, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Identities(tmp_path / "other")
    async with running(identities, tmp_path, is_mutual=True) as one:
        assert await one.health("liveness") == SERVING
        identities.ca_file.write_bytes(other.ca_pem)
        assert one.certificates is not None
        await one.certificates.look()
        await refused(one, identities.client())
        certificate, key = other.issue("envoy.test")
        welcome = one.connect(grpc.ssl_channel_credentials(identities.ca_pem, key, certificate))
        assert await one.health("liveness", welcome) == SERVING
        await welcome.close()


async def test_connections_succeed_while_files_are_renewed(
    identities: Identities, tmp_path: Path
) -> None:
    served = asyncio.Semaphore(0)
    async with running(identities, tmp_path) as one:

        async def connects() -> None:
            for _ in range(15):
                channel = one.connect(identities.anybody())
                assert await one.health("liveness", channel) == SERVING
                await channel.close()
                served.release()

        async def renews() -> None:
            assert one.certificates is not None
            for _ in range(15):
                identities.renew()
                await one.certificates.look()
                await served.acquire()

        await asyncio.gather(connects(), connects(), renews())


async def test_failed_handshakes_leave_no_connection_behind(
    identities: Identities, tmp_path: Path
) -> None:
    async with running(identities, tmp_path) as one:
        host, port = one.listen.split(":")
        for text in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x00\x05hello"):
            with socket.create_connection((host, int(port))) as peer:
                peer.sendall(text)
        assert await one.health("liveness") == SERVING
        await one.channel.close()
        server = one.server
        await until(lambda: server.figures().connections == 0)


async def test_peer_without_a_handshake_is_disconnected(
    identities: Identities, tmp_path: Path
) -> None:
    bounds = ServerBounds(handshake_seconds=0.1)
    async with running(identities, tmp_path, bounds=bounds) as one:
        host, port = one.listen.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        assert await reader.read() == b""
        writer.close()
        assert one.server.figures().faults["TLS_HANDSHAKE"] == 1


async def silent_peers(one: Running, count: int, source: str = "127.0.0.1") -> list[socket.socket]:
    """Opens connections that never send anything, from this address."""
    host, port = one.listen.split(":")
    peers = [socket.socket() for _ in range(count)]
    for peer in peers:
        peer.bind((source, 0))
        peer.setblocking(False)
        await asyncio.get_running_loop().sock_connect(peer, (host, int(port)))
    return peers


def is_closed(peer: socket.socket) -> bool:
    try:
        return peer.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


async def test_handshakes_of_one_address_end_none_of_another(
    identities: Identities, tmp_path: Path
) -> None:
    bounds = ServerBounds(max_handshakes=4)
    async with running(identities, tmp_path, bounds=bounds) as one:
        (ours,) = await silent_peers(one, 1)
        others = await silent_peers(one, 12, "127.0.0.2")
        await until(lambda: sum(map(is_closed, others)) >= 9)
        assert not is_closed(ours)
        for peer in (ours, *others):
            peer.close()


@pytest.mark.parametrize("on", [asyncio.run, event_loop.run], ids=["asyncio", "the router's loop"])
@pytest.mark.parametrize(
    "bounds", [ServerBounds(max_handshakes=4), ServerBounds(max_connections=4)]
)
def test_peers_without_a_handshake_are_bounded_and_lock_out_no_client(
    on: Callable[[Coroutine[Any, Any, None]], None],
    bounds: ServerBounds,
    identities: Identities,
    tmp_path: Path,
) -> None:
    async def request() -> None:
        async with running(identities, tmp_path, bounds=bounds) as one:
            call = await placed(one)
            peers = await silent_peers(one, 12)
            await until(lambda: sum(map(is_closed, peers)) >= 8)
            assert not is_closed(peers[-1])
            fresh = one.connect(identities.anybody())
            assert await one.health("liveness", fresh) == SERVING
            await fresh.close()
            await call.done_writing()
            assert await call.code() is grpc.StatusCode.OK
            assert one.server.figures().faults["TLS_HANDSHAKE"] >= 8
            for peer in peers:
                peer.close()

    on(request())


def test_tls_runs_on_the_event_loop_of_the_router(identities: Identities, tmp_path: Path) -> None:
    async def request() -> None:
        async with running(identities, tmp_path, is_mutual=True) as one:
            call = await placed(one)
            assert one.certificates is not None
            for _ in range(2):
                identities.renew()
                await one.certificates.look()
            fresh = one.connect(identities.client())
            assert await one.health("liveness", fresh) == SERVING
            await fresh.close()
            await refused(one, identities.anybody())
            await call.done_writing()
            assert await call.code() is grpc.StatusCode.OK

    event_loop.run(request())
