"""`--enable-ssl-refresh`: a renewed certificate is used without a restart."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

CHECK_SECONDS = 1.0


async def refresh_certificates(
    context: ssl.SSLContext, certfile: str, keyfile: str | None, ca_certs: str | None
) -> None:
    """Runs until cancelled. Connections made after a file has changed get what it holds then; what can't be used, such
    as a certificate whose key isn't there yet, is tried again at the next look."""
    files = [name for name in (certfile, keyfile, ca_certs) if name is not None]
    used = complained = _stamps(files)
    while True:
        await asyncio.sleep(CHECK_SECONDS)
        stamps = _stamps(files)
        if stamps == used:
            continue
        try:
            # A pair that doesn't match would leave the context without a key.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile)
            context.load_cert_chain(certfile, keyfile)
            if ca_certs is not None:
                context.load_verify_locations(ca_certs)
        except OSError as error:  # `ssl.SSLError` is one
            if stamps != complained:
                logger.warning("The new certificate can't be used yet: %s", error)
            complained = stamps
        else:
            used = stamps
            logger.info("The certificate has changed; new connections get the new one.")


def _stamps(files: Sequence[str]) -> list[tuple[int, int] | None]:
    """What tells a file from the one before it; None where there is none at the moment."""
    found: list[tuple[int, int] | None] = []
    for name in files:
        try:
            status = Path(name).stat()
            found.append((status.st_mtime_ns, status.st_ino))
        except OSError:
            found.append(None)
    return found
