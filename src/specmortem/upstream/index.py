"""Where the wheels are: pip's index settings, one HTTP session for all, and the wheel of a release."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import requests
from packaging.specifiers import SpecifierSet
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import Version
from pypi_simple import PYPI_SIMPLE_ENDPOINT, NoSuchProjectError, ProjectPage, PyPISimple
from pypi_simple.errors import UnsupportedRepoVersionError
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from specmortem.errors import UnavailableError

TIMEOUT_S = (10.0, 60.0)  # connect, read
RETRIES = 2
WAY_OUT = "set PIP_INDEX_URL to an index you can reach, or give an unpacked release as tree:DIR"
_TRUE = {"1", "y", "yes", "t", "true", "on"}


@dataclass(frozen=True)
class Wheel:
    """A wheel on an index; `url` carries no credentials and no fragment."""

    filename: str
    url: str
    sha256: str = ""


def pip_settings() -> dict[str, str]:
    """pip's effective settings (`index-url`, `no-index`, `cert`, ...): files, then PIP_* variables."""
    environment = {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
    settings = dict(_pip_files(tuple(sorted(environment.items()))))
    settings.update({key[4:].lower().replace("_", "-"): value for key, value in environment.items()})
    return settings


@cache
def _pip_files(environment: tuple[tuple[str, str], ...]) -> Mapping[str, str]:
    """Settings of pip's configuration files; empty where pip is not installed or does not answer."""
    if find_spec("pip") is None:
        return {}
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    found = {}
    for section in ("global", "download", "install"):
        for key, value in re.findall(rf"^{section}\.([\w-]+)=(.*)$", listed, re.MULTILINE):
            with contextlib.suppress(ValueError, SyntaxError):
                found[key] = str(ast.literal_eval(value))
    return found


def endpoint() -> str:
    """The index that pip would ask.

    Raises UnavailableError where pip is told to use none.
    """
    settings = pip_settings()
    if settings.get("no-index", "").lower() in _TRUE:
        raise UnavailableError(f"pip is configured with no-index, so no release can be fetched; {WAY_OUT}")
    return (settings.get("index-url") or PYPI_SIMPLE_ENDPOINT).rstrip("/")


@contextlib.contextmanager
def session() -> Iterator[requests.Session]:
    """A session with pip's certificates, timeouts left to the caller, and RETRIES retries."""
    with requests.Session() as opened:
        retry = Retry(
            total=RETRIES, backoff_factor=0.2, status_forcelist=(502, 503, 504), raise_on_status=False
        )
        for scheme in ("https://", "http://"):
            opened.mount(scheme, HTTPAdapter(max_retries=retry))
        opened.verify = pip_settings().get("cert") or True
        yield opened


def redacted(text: object) -> str:
    """The text without the user and password of any URL in it."""
    return re.sub(r"//[^/@\s]+@", "//", str(text))


def bare(url: str) -> str:
    """The URL without credentials and fragment."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, parts.query, ""))


def with_credentials(url: str, index: str) -> str:
    """The URL with the index's own credentials, if both are on one host."""
    parts, source = urlsplit(url), urlsplit(index)
    user, _, host = source.netloc.rpartition("@")
    if not user or host != parts.netloc or source.scheme != parts.scheme:
        return url
    return urlunsplit(parts._replace(netloc=f"{user}@{host}"))


def find_wheel(index: str, version: Version) -> Wheel:
    """The wheel of vLLM `version`: x86_64 manylinux if there is one, of the highest build.

    Raises UnavailableError when the index does not answer or has no such wheel.
    """
    offered = list(_wheels(_page(index)))
    matching = [wheel for wheel in offered if wheel[0] in SpecifierSet(f"=={version}", prereleases=True)]
    if not matching:
        known = sorted({found for found, _, _ in offered})
        span = f"{known[0]} to {known[-1]}" if known else "none"
        raise UnavailableError(
            f"{redacted(index)} has no wheel of vllm {version} (wheels there: {span}); name another release, "
            "or unpack its source and give it as tree:DIR"
        )
    return max(matching, key=lambda wheel: wheel[1])[2]


def versions() -> set[Version]:
    """Every version of vLLM that the index in use has a wheel of.

    Raises UnavailableError when there is none to ask, or it does not answer.
    """
    return {version for version, _, _ in _wheels(_page(endpoint()))}


def _wheels(page: ProjectPage) -> Iterator[tuple[Version, tuple[Any, ...], Wheel]]:
    """Version, preference and place of each wheel on the page."""
    for package in page.packages:
        try:
            _, version, build, tags = parse_wheel_filename(package.filename)
        except InvalidWheelFilename:
            continue
        platforms = {tag.platform for tag in tags}
        x86 = any(platform.endswith("x86_64") for platform in platforms)
        manylinux = any(platform.startswith("manylinux") for platform in platforms)
        preference = (x86 and manylinux, x86, version.local is None, build or (-1, ""))
        wheel = Wheel(package.filename, bare(package.url), package.digests.get("sha256", ""))
        yield version, preference, wheel


@cache
def _page(index: str) -> ProjectPage:
    """vLLM's project page, read once per process and index."""
    try:
        with session() as opened, PyPISimple(index, session=opened) as client:
            return client.get_project_page("vllm", timeout=TIMEOUT_S)
    except NoSuchProjectError as error:
        raise UnavailableError(f"the index {redacted(index)} has no project vllm; {WAY_OUT}") from error
    except (OSError, ValueError, UnsupportedRepoVersionError) as error:
        raise UnavailableError(
            f"the index {redacted(index)} did not deliver: {redacted(error)}; {WAY_OUT}"
        ) from error
