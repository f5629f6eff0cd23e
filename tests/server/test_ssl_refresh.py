"""A server's certificate is replaced while it serves; who connects afterwards sees the new one."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from jaxinfer.server import ssl_refresh
from tests.server.story_server import LIMIT

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


def make_certificate(directory: Path, name: str) -> tuple[Path, Path]:
    """The certificate and its key."""
    cert, key = directory / f"{name}.pem", directory / f"{name}.key"
    command = ["openssl", "req", "-x509", "-nodes", "-days", "2", "-subj", f"/CN={name}"]
    command += ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    subprocess.run(
        [*command, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True
    )
    return cert, key


def test_new_connections_get_the_new_certificate(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(ssl_refresh, "CHECK_SECONDS", 0.001)
    old, old_key = make_certificate(tmp_path, "old")
    new, new_key = make_certificate(tmp_path, "new")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    shutil.copy(old, cert), shutil.copy(old_key, key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)

    def der(path: Path) -> bytes:
        return ssl.PEM_cert_to_DER_cert(path.read_text())

    async def use() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                await reader.read()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
        port = server.sockets[0].getsockname()[1]

        async def seen() -> bytes:
            trusting = ssl.create_default_context()
            trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
            _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
            found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
            writer.close()
            return found

        async def until(condition) -> None:
            async with asyncio.timeout(LIMIT):
                while not condition():
                    await asyncio.sleep(0)

        refreshing = asyncio.create_task(
            ssl_refresh.refresh_certificates(context, str(cert), str(key), None)
        )
        assert await seen() == der(old)
        # Its key isn't there yet.
        shutil.copy(new, cert)
        await until(lambda: "can't be used yet" in caplog.text)
        assert await seen() == der(old)
        shutil.copy(new_key, key)
        await until(lambda: "has changed" in caplog.text)
        assert await seen() == der(new)
        refreshing.cancel()
        server.close()

    caplog.set_level("INFO", logger="jaxinfer")
    asyncio.run(use())
    assert caplog.text.count("can't be used yet") == 1
