"""A certificate authority of this test alone, and a server's certificate for 127.0.0.1 by it."""

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
        request, own_key, own = folder / "own.csr", folder / "own.key", folder / "own.pem"
        _openssl("req", *KEY, "-keyout", own_key, "-out", request, "-subj", "/CN=127.0.0.1")
        names = folder / "names"
        names.write_text("subjectAltName=IP:127.0.0.1\nbasicConstraints=CA:FALSE\n")
        signed = ("-CA", authority, "-CAkey", key, "-CAcreateserial", "-extfile", names)
        _openssl("x509", "-req", "-in", request, "-out", own, *signed)
        return cls(authority, own, own_key)

    def tls(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.key)
        return context


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
