"""Puts facts, notebooks and data into the wheel, so that an installed package needs no checkout."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

BUNDLED = "specmortem/bundled"
PATTERNS = (
    "investigations/*/*.toml",
    "investigations/*/runs/*/*.json",
    "notebooks/*.ipynb",
    "data/*.*",
    "data/tiny-recall/*",
)


class Bundle(BuildHookInterface[Any]):
    """A build hook of hatchling; an editable install reads the checkout itself."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Name the files and their places in the wheel."""
        if version == "editable":
            return
        root = Path(self.root)
        for pattern in PATTERNS:
            for path in sorted(root.glob(pattern)):
                if path.is_file():
                    build_data["force_include"][str(path)] = f"{BUNDLED}/{path.relative_to(root)}"
