"""Released vLLM code under test, without installing or importing vLLM.

`resolve` finds a tree (a release on the package index, a folder, or what is installed) and fetches only the
files asked for; `lift` makes one of its functions live, with the released file and line numbers; hashes tell
whether two trees hold the same code.
"""

from specmortem.upstream.cache import default_cache
from specmortem.upstream.errors import LiftError, MissingFileError, NotPresentError
from specmortem.upstream.lift import Lifted, body_hash, closure_hash, definition, lift, lift_method
from specmortem.upstream.stand_ins import StandIns
from specmortem.upstream.tree import Tree, give, is_stored, resolve

__all__ = [
    "LiftError",
    "Lifted",
    "MissingFileError",
    "NotPresentError",
    "StandIns",
    "Tree",
    "body_hash",
    "closure_hash",
    "default_cache",
    "definition",
    "give",
    "is_stored",
    "lift",
    "lift_method",
    "resolve",
]
