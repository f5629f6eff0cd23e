"""`--restart-engine`: a new engine core in place of one that has died."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from jaxinfer.engine.core_group import CoreGroup
from jaxinfer.engine.errors import EngineDeadError
from jaxinfer.engine.process_client import ProcessClient
from jaxinfer.remote_core import CoreStarter

logger = logging.getLogger(__name__)

CHECK_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 60.0


async def restart_when_dead(cores: CoreGroup, core: int, starter: CoreStarter) -> None:
    """Runs until cancelled. A core that can't start is tried again after a pause that doubles each time."""
    pause = CHECK_SECONDS
    while True:
        await asyncio.sleep(pause)
        try:
            cores.check_health(core)
        except EngineDeadError as error:
            logger.warning("%s A new one is started.", error)
        else:
            pause = CHECK_SECONDS
            continue
        process = starter.start(core)
        try:
            ready = await asyncio.to_thread(process.wait_ready)
        except (EngineDeadError, ValueError) as error:
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            logger.error("The engine core can't start (again in %.0f s): %s", pause, error)
            continue
        except asyncio.CancelledError:
            process.kill()
            raise
        await asyncio.to_thread(cores.replace, core, partial(ProcessClient, process, ready))
        logger.info("The engine core serves again.")
