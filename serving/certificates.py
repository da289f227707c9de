"""Certificates from files, checked before anything listens: a wrong one stops the start."""

import ssl
from pathlib import Path

from kvtransfer.control import ClusterTls
from serving.config import ClusterTlsConfig, ConfigError


def check_pem(what: str, cert: str, key: str, ca: str) -> None:
    """ConfigError when a file is missing, is no PEM, or the key is another certificate's."""
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key)
        if ca:
            context.load_verify_locations(ca)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"{what}: {cert}, {key}: {error.strerror or error}") from None


def read_cluster_tls(config: ClusterTlsConfig) -> ClusterTls | None:
    """What gateways and workers show each other; None when they speak plain text."""
    if not config.is_on:
        return None
    check_pem("cluster_tls", config.cert, config.key, config.ca)
    cert, key, ca = (Path(path).read_bytes() for path in (config.cert, config.key, config.ca))
    return ClusterTls(cert, key, ca)
