"""What a cause needs of a configuration of vLLM, and whether that holds; each incident states its rules with these.

A rule is a list of conditions on a `Config`. Each holds, does not hold, or cannot be told, and says so in words; one
that does not hold makes the cause unreachable, one that cannot be told makes the answer `unknown`. Defaults are what
the released configuration code gave when it was run (`defaults.csv`), else those of its source, named at each; they
are used only where the launch command is known whole.
"""

from specmortem.exposure.config import NO_SPECULATION, UNNAMED, Config, Runner, drafter_family, is_hybrid
from specmortem.exposure.resolve import follows_target, resolve
from specmortem.exposure.rules import *  # noqa: F403
from specmortem.exposure.rules import Condition, Reach, Resolved, Rule

__all__ = [
    "NO_SPECULATION",
    "UNNAMED",
    "Condition",
    "Config",
    "Reach",
    "Resolved",
    "Rule",
    "Runner",
    "drafter_family",
    "follows_target",
    "is_hybrid",
    "resolve",
]
