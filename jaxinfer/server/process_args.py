"""Flags of `jaxinfer serve` that say which processes there are, and what happens when one dies."""

from __future__ import annotations

import argparse
from typing import Any, get_args

from jaxinfer.config import DataParallelRouting


def add_process_args(parser: argparse.ArgumentParser, default: Any) -> None:
    """`default` is a `ListenArgs`."""
    group = parser.add_argument_group("processes")
    group.add_argument(
        "--restart-engine",
        action="store_true",
        help="start a new engine core when one dies; without, /health stays 503",
    )
    group.add_argument(
        "--engine-heartbeat-timeout",
        type=float,
        default=default.engine_heartbeat_timeout,
        metavar="SECONDS",
        help="an engine core that is silent for so long is killed; compilations don't count; 0: never (default: %(default)s)",
    )

    group.add_argument(
        "--data-parallel-routing",
        default=default.data_parallel_routing,
        choices=get_args(DataParallelRouting),
        help="load: requests go to the engine core that has least to do; prefix: where their beginning was computed "
        "last, unless that is overloaded (default: %(default)s)",
    )

    group.add_argument(
        "--api-server-count",
        type=int,
        default=default.api_server_count,
        metavar="N",
        help="processes that answer HTTP requests (default: %(default)s)",
    )


def check_process_args(parsed: argparse.Namespace) -> None:
    """Raises `ValueError` for what can't be."""
    if parsed.api_server_count < 1:
        raise ValueError(f"api_server_count must be at least 1, got {parsed.api_server_count}.")
    timeout = parsed.engine_heartbeat_timeout
    if not 0 <= timeout < float("inf"):
        raise ValueError(f"engine_heartbeat_timeout must be at least 0, got {timeout}.")
