"""A certificate authority of this test alone, a server's certificate for 127.0.0.1 by it, and others."""

import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True)
class Authority:
    file: Path
    """Makes clients believe the server, as `SSL_CERT_FILE`."""
    certificate: Path
    key: Path

    @classmethod
    def of(cls, folder: Path) -> "Authority":
        authority, key = folder / "ca.pem", folder / "ca.key"
        _openssl("req", "-x509", *KEY, "-keyout", key, "-out", authority, "-subj", "/CN=tests")
        own = issue(folder, "own", "IP:127.0.0.1")
        return cls(authority, own.certificate, own.key)

    def tls(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.key)
        return context


@dataclass(frozen=True)
class Issued:
    certificate: Path
    key: Path


def issue(folder: Path, name: str, holder: str) -> Issued:
    """A certificate by the authority in `folder`. `holder`: as `IP:127.0.0.1` or `DNS:temporal.example`."""
    request, key, certificate = (folder / f"{name}.{end}" for end in ("csr", "key", "pem"))
    _openssl("req", *KEY, "-keyout", key, "-out", request, "-subj", f"/CN={name}")
    names = folder / f"{name}.names"
    names.write_text(f"subjectAltName={holder}\nbasicConstraints=CA:FALSE\n")
    signed = ("-CA", folder / "ca.pem", "-CAkey", folder / "ca.key", "-CAcreateserial")
    _openssl("x509", "-req", "-in", request, "-out", certificate, *signed, "-extfile", names)
    return Issued(certificate, key)


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
