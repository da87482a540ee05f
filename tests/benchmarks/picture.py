"""Draws the picture of docs/loader.md: the page of a loader that has run, in headless Chromium.

    python tests/benchmarks/picture.py

It takes ``chromium``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import drain
from peers import Work

from minloader import Loader

PICTURE = Path(__file__).parents[2] / "docs" / "stats.png"
OPTIONS = (
    "headless",
    "no-sandbox",  # as root it would not start with one
    "disable-gpu",
    "hide-scrollbars",
    "window-size=1000,600",
    "force-device-scale-factor=0.75",
    "blink-settings=preferredColorScheme=1",  # a light one
    "virtual-time-budget=3000",
)


def main() -> None:
    """Draw it."""
    dataset: Any = Work(400, 0.012)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "page.html")
        with Loader(dataset, range(400), num_workers=2) as loader:
            drain(loader)
            loader.stats.to_html(page)
        command = ["chromium", *(f"--{option}" for option in OPTIONS)]
        command += [f"--user-data-dir={folder}", f"--screenshot={PICTURE}", page.as_uri()]
        environment = {**os.environ, "HOME": folder}  # where it leaves more than its profile
        done = subprocess.run(command, env=environment, capture_output=True, timeout=100)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
