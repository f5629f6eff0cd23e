"""The engine core's process: `python -m jaxinfer.core_main LOG_LEVEL INBOX OUTBOX`, started by `jaxinfer.remote_core`."""

from __future__ import annotations

import logging
import signal
import sys

from jaxinfer.engine.core_process import run_core
from jaxinfer.engine_factory import build_core


def main() -> int:
    log_level, inbox, outbox = sys.argv[1:]
    logging.basicConfig(
        level=log_level.upper(), format="%(levelname)s %(name)s: %(message)s", force=True
    )
    # A terminal's Ctrl-C and a service manager's SIGTERM reach the whole group; the parent drains first.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    return run_core(inbox, outbox, build_core)


if __name__ == "__main__":
    sys.exit(main())
