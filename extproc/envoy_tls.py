"""TLS from Envoy to the router."""

from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.extensions.transport_sockets.tls import v3 as tls
from envoy_data_plane.envoy.type.matcher import v3 as matcher
from envoy_data_plane.google.protobuf import Any

from extproc.config import RouterTls


def transport_socket(options: RouterTls) -> core.TransportSocket:
    """TLS to the router, whose certificate is checked, and its name if there is one."""
    trusted = tls.CertificateValidationContext(trusted_ca=core.DataSource(filename=options.ca))
    if options.name is not None:
        name = tls.SubjectAltNameMatcher(
            san_type=tls.SubjectAltNameMatcherSanType.DNS,
            matcher=matcher.StringMatcher(exact=options.name),
        )
        trusted.match_typed_subject_alt_names = [name]
    common = tls.CommonTlsContext(
        tls_params=tls.TlsParameters(
            tls_minimum_protocol_version=tls.TlsParametersTlsProtocol.TLSv1_2,
            tls_maximum_protocol_version=tls.TlsParametersTlsProtocol.TLSv1_3,
        ),
        alpn_protocols=["h2"],
        validation_context=trusted,
    )
    if options.certificate is not None and options.key is not None:
        own = tls.TlsCertificate(
            certificate_chain=core.DataSource(filename=options.certificate),
            private_key=core.DataSource(filename=options.key),
        )
        common.tls_certificates = [own]
    context = tls.UpstreamTlsContext(common_tls_context=common, sni=options.name or "")
    return core.TransportSocket(name="envoy.transport_sockets.tls", typed_config=Any.pack(context))
