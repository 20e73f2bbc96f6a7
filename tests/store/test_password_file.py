"""A store's password may stand in a file, such as a mounted secret, and not in the configuration."""

import asyncio
import ssl
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest
import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from cluster.core.errors import ConfigError
from cluster.local.embedded_redis import EmbeddedRedis
from cluster.store.client import connect


@pytest.mark.parametrize("connections", [None, 2])
async def test_the_file_says_the_password(tmp_path: Path, connections: int | None) -> None:
    path = tmp_path / "the password"
    with EmbeddedRedis() as server:
        parts = urlsplit(server.url)
        path.write_text(f"{parts.password}\n")
        url = f"redis://{parts.hostname}:{parts.port}/0?password_file={quote(str(path))}&health_check_interval=7"
        async with connect(url, connections=connections) as client:
            assert await client.ping()
            assert client.connection_pool.connection_kwargs["health_check_interval"] == 7


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"redis\.url: password_file: cannot be read"):
        connect(f"redis://somewhere?password_file={tmp_path / 'nothing'}")


async def test_a_user_of_redis_has_the_password_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_text("secret of the user")
    with EmbeddedRedis() as server:
        parts = urlsplit(server.url)
        async with connect(server.url) as admin:
            await admin.execute_command("ACL", "SETUSER", "a@b", "on", ">secret of the user", "+select", "+acl|whoami")
        # As the chart writes it: a name in the URL is quoted.
        url = f"redis://a%40b@{parts.hostname}:{parts.port}/0?password_file={quote(str(path))}"
        async with connect(url) as client:
            assert await client.execute_command("ACL", "WHOAMI") == b"a@b"


def own_authority(folder: Path) -> tuple[Path, Path]:
    """The certificate and the key of 127.0.0.1, which signs itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    here = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    now = datetime.now(UTC)
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(here, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate, private = folder / "ca.crt", folder / "ca.key"
    certificate.write_bytes(signed.public_bytes(Encoding.PEM))
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return certificate, private


async def test_the_certificate_authority_of_a_redis_is_named_in_the_url(tmp_path: Path) -> None:
    certificate, private = own_authority(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, private)
    with EmbeddedRedis() as embedded:
        parts = urlsplit(embedded.url)

        async def decrypt(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            """The embedded Redis has no TLS: this listener has it, and passes the bytes on."""
            inner_reader, inner_writer = await asyncio.open_connection(parts.hostname, parts.port)

            async def passed_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
                while data := await source.read(4096):
                    target.write(data)
                target.close()

            await asyncio.gather(passed_on(reader, inner_writer), passed_on(inner_reader, writer))

        async with asyncio.timeout(30), await asyncio.start_server(decrypt, "127.0.0.1", 0, ssl=context) as server:
            url = f"rediss://:{parts.password}@127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
            async with connect(f"{url}?ssl_ca_certs={quote(str(certificate))}") as client:
                assert await client.ping()
            async with connect(url) as client:
                with pytest.raises(redis.ConnectionError, match=r"(?i)certificate verify failed"):
                    await client.ping()
