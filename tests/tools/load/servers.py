"""Starts the misbehaving server, and drives load at it."""

import asyncio
import json
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from specmortem.tools.load.driver import Driver
from specmortem.tools.load.settings import Limits, Settings, Shape

SCRIPT = Path(__file__).with_name("server.py")
SHAPE = Shape(
    "toy",
    "a test",
    concurrency=(4,),
    requests=12,
    prompt_tokens=(64, 64),
    max_tokens=(100, 100),
    temperature=0.0,
    request_s=30,
    stream=True,
)


class Running:
    """A server process."""

    def __init__(self, process):
        self.process = process
        self.url = f"http://127.0.0.1:{int(process.stdout.readline())}"

    def seen(self):
        """What arrived."""
        with urllib.request.urlopen(f"{self.url}/seen", timeout=10) as response:
            return json.load(response)


@contextmanager
def running(**cues):
    """A server that follows these cues, ended afterwards."""
    command = [sys.executable, "-I", "-S", str(SCRIPT), json.dumps(cues)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Running(process)
        finally:
            process.kill()


def settings(url, *, shape=None, limits=None, **changes):
    """Small and quick settings."""
    shape = replace(SHAPE, **(shape or {}))
    limits = Limits(**{"idle_s": 10.0, "first_byte_s": 10.0, **(limits or {})})
    return Settings(url=url, shape=shape, limits=limits, **{"metrics_s": 0, **changes})


def drive(made, **more):
    """The result of a run."""
    return asyncio.run(Driver(made, **more).run())
