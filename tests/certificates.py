"""A small authority for tests: certificates as PEM files, good and bad ones."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Pair:
    cert: Path
    key: Path


class Authority:
    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(name, name, self._key, days=1)
        builder = builder.add_extension(x509.BasicConstraints(True, None), critical=True)
        self.pem = folder / f"{name}.pem"
        certificate = builder.sign(self._key, hashes.SHA256())
        self.pem.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def sign(self, name: str, *, days: int = 1, host: str = "localhost") -> Pair:
        """For ``host`` and 127.0.0.1; negative ``days`` are over."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.DNSName(host)]
        if host == "localhost":
            names.append(x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
        builder = _builder(name, self._name, key, days)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        pair = Pair(self._folder / f"{name}.crt", self._folder / f"{name}.key")
        pair.cert.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        pair.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return pair


def _builder(
    name: str, issuer: str, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    until = datetime.datetime.now(datetime.UTC) + days * DAY
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(until - 2 * DAY)
        .not_valid_after(until)
    )
