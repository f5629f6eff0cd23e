"""`jaxinfer serve` with the fake device's core: `python story_serve_main.py FAKE_CORE_KIND MODEL_DIR FLAGS…`."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from jaxinfer import cli, remote_core  # noqa: E402


def main() -> int:
    kind, *arguments = sys.argv[1:]
    fake = [sys.executable, str(ROOT / "tests" / "engine" / "fake_core_main.py"), kind]
    remote_core.core_command = lambda log_level: fake
    return cli.main(["serve", *arguments, "--port", "0", "--load-format", "dummy"])


if __name__ == "__main__":
    sys.exit(main())
