"""The trees of the judge's tests serve those of the audit."""

from judge.conftest import CAUSE, cache, make_hostile, make_tree

__all__ = ["CAUSE", "cache", "make_hostile", "make_tree"]
