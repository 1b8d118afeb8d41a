"""Architecture rules: what ops do along the token dim, how attention and its masks are recognised."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from longstraw import ops
from longstraw.arch import associative, aten
from longstraw.arch.rules import LayoutRule, Rule
from longstraw.arch.user_scan import Scan

__all__ = ["Rule", "Scan", "installed_rules", "layout_rules"]


def installed_rules() -> list[Rule | Scan]:
    """Return the rules of installed packages (entry-point group `longstraw.rules`).

    An entry point names a sequence of rules, or a function that returns one.
    """
    rules: list[Rule | Scan] = []
    for entry in entry_points(group="longstraw.rules"):
        found = entry.load()
        rules += found() if callable(found) else found
    return rules


def layout_rules() -> dict[Any, LayoutRule]:
    """Return every known layout rule: built in, and of installed packages."""
    table: dict[Any, LayoutRule] = {**aten.RULES, ops.attention: aten.attention, ops.select: aten.selection}
    return {**table, **associative.RULES, **{rule.target: rule.layout for rule in installed_rules()}}
