"""Architecture rules: what ops do along the token dim, how attention and its masks are recognised."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from longstraw import ops
from longstraw.arch import aten
from longstraw.arch.rules import LayoutRule, Rule

__all__ = ["Rule", "layout_rules"]


def layout_rules() -> dict[Any, LayoutRule]:
    """Return every known layout rule: built in, and of installed packages (entry-point group `longstraw.rules`).

    An entry point names a sequence of `Rule` records, or a function that returns one.
    """
    table: dict[Any, LayoutRule] = {**aten.RULES, ops.attention: aten.attention}
    for entry in entry_points(group="longstraw.rules"):
        found = entry.load()
        for rule in found() if callable(found) else found:
            table[rule.target] = rule.layout
    return table
