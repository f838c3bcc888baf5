"""Certificates of our own authority, as files of a router and as credentials of a client."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import trustme

from extproc.config.schema import Tls

NAME = "router.test"


class Identities:
    """An authority, a router's files in a folder, and clients that trust it."""

    def __init__(self, folder: Path) -> None:
        self.authority = trustme.CA()
        self.ca_file = folder / "ca.pem"
        self.certificate_file = folder / "tls.crt"
        self.key_file = folder / "tls.key"
        self.ca_file.write_bytes(self.ca_pem)
        self.renew()

    @property
    def ca_pem(self) -> bytes:
        return self.authority.cert_pem.bytes()

    def issue(self, name: str = NAME, days: int | None = None) -> tuple[bytes, bytes]:
        """Returns a certificate and its key; days: how long it is valid, None for a long time."""
        end = None if days is None else datetime.now(UTC) + timedelta(days)
        issued = self.authority.issue_cert(name, "127.0.0.1", not_after=end)
        return issued.cert_chain_pems[0].bytes(), issued.private_key_pem.bytes()

    def renew(self, days: int | None = None) -> None:
        """Writes another certificate for the router."""
        certificate, key = self.issue(NAME, days)
        self.certificate_file.write_bytes(certificate)
        self.key_file.write_bytes(key)

    def tls(self, *, is_mutual: bool = False) -> Tls:
        """The router's TLS configuration."""
        return Tls(
            certificate=str(self.certificate_file),
            key=str(self.key_file),
            client_ca=str(self.ca_file) if is_mutual else None,
        )

    def options(self, *, is_mutual: bool = False) -> str:
        """The same as YAML, to be appended to other keys of `extproc`."""
        ca = f", client_ca: {self.ca_file}" if is_mutual else ""
        return f", tls: {{certificate: {self.certificate_file}, key: {self.key_file}{ca}}}"

    def tls_files(self) -> tuple[str, str]:
        """Writes a client's certificate and key; returns the paths of the files."""
        files = self.ca_file.with_name("client.crt"), self.ca_file.with_name("client.key")
        for file, content in zip(files, self.issue("envoy.test"), strict=True):
            file.write_bytes(content)
        return str(files[0]), str(files[1])

    def anybody(self) -> grpc.ChannelCredentials:
        """A client without a certificate."""
        return grpc.ssl_channel_credentials(self.ca_pem)

    def client(self) -> grpc.ChannelCredentials:
        """A client with a certificate of the authority."""
        certificate, key = self.issue("envoy.test")
        return grpc.ssl_channel_credentials(self.ca_pem, key, certificate)
