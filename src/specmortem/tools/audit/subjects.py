"""What an audit judges where its command line names no subject."""

from __future__ import annotations

from packaging.version import Version

from specmortem import upstream
from specmortem.errors import UnavailableError
from specmortem.upstream import index

FIRST_RELEASE = Version("0.19.0")


def is_installed() -> bool:
    """Whether this environment has vLLM."""
    try:
        upstream.resolve("installed")
    except UnavailableError:
        return False
    return True


def all_releases() -> list[str]:
    """Every release from 0.19.0 on that the index offers a wheel of, the oldest first; no candidates.

    Raises UnavailableError when the index does not answer.
    """
    final = sorted(
        v for v in index.versions() if v >= FIRST_RELEASE and not v.is_prerelease and v.local is None
    )
    return [f"vllm=={version}" for version in final]
