"""`--restart-engine`: a new engine core in place of one that has died."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

from jaxinfer.async_llm import AsyncLLM
from jaxinfer.config import EngineArgs
from jaxinfer.engine.core_handle import CoreProcess
from jaxinfer.engine.errors import EngineDeadError
from jaxinfer.engine.process_client import ProcessClient

logger = logging.getLogger(__name__)

CHECK_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 60.0


async def restart_when_dead(
    llm: AsyncLLM, args: EngineArgs, command: Sequence[str], heartbeat_timeout: float
) -> None:
    """Runs until cancelled. A core that can't start is tried again after a pause that doubles each time."""
    pause = CHECK_SECONDS
    while True:
        await asyncio.sleep(pause)
        try:
            llm.check_health()
        except EngineDeadError as error:
            logger.warning("%s A new one is started.", error)
        else:
            pause = CHECK_SECONDS
            continue
        process = CoreProcess(command, args, heartbeat_timeout)
        try:
            ready = await asyncio.to_thread(process.wait_ready)
        except (EngineDeadError, ValueError) as error:
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            logger.error("The engine core can't start (again in %.0f s): %s", pause, error)
            continue
        except asyncio.CancelledError:
            process.kill()
            raise
        llm.reconnect(partial(ProcessClient, process, ready))
        logger.info("The engine core serves again.")
