"""Block programs: how to compute any block of an attention mask without building the mask.

A *block* is the part of a mask for some query tokens, some key tokens and some rows. A *cut* says that a tensor
dimension is restricted to one of these ranges; a dimension without a cut is taken whole. A program is a list of steps;
each step's result is named by its place in the list (a *slot*). Steps whose cuts name neither tokens nor rows do not
depend on the block.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

__all__ = [
    "HIDING",
    "UNSEEN",
    "BlockProgram",
    "Call",
    "Count",
    "Cut",
    "Cuts",
    "Fill",
    "Lookup",
    "Read",
    "Reshape",
    "Side",
    "Slot",
    "Step",
    "Triangle",
]


UNSEEN = -1e30
"""A score of at most this, finite or not, is meant as minus infinity: the key isn't selected."""
HIDING = -1e4
"""A number of at most this that is added to scores or replaces them hides their keys, as long as there are others of a
usual score."""


class Side(enum.Enum):
    """What the range of a cut counts."""

    ROW = "row"
    QUERY = "query"
    KEY = "key"


@dataclass(frozen=True)
class Cut:
    """A dimension restricted to the block's rows, query tokens or key tokens.

    `inner`: the dimension is (side, inner) flattened, as in [rows * heads, ...]. `offset`: index of the side's token 0.
    """

    side: Side
    inner: int = 1
    offset: int = 0

    def __str__(self) -> str:
        text = self.side.value + (f"*{self.inner}" if self.inner != 1 else "")
        return text + (f"{self.offset:+d}" if self.offset else "")


Cuts = tuple[Cut | None, ...]  # one entry per tensor dimension


@dataclass(frozen=True)
class Slot:
    """The result of an earlier step."""

    index: int

    def __str__(self) -> str:
        return f"%{self.index}"


@dataclass(frozen=True)
class Read:
    """An input, narrowed along its cuts; a number has no cuts."""

    input: int
    cuts: Cuts


@dataclass(frozen=True)
class Fill:
    """A tensor with the same value everywhere."""

    shape: tuple[int | Cut, ...]
    value: bool | int | float | Slot
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Count:
    """`start + step * index` along one cut dimension. `num_rows` is given where that counts rows."""

    cut: Cut
    start: int | float | Slot
    step: int | float | Slot
    num_rows: int | Slot | None
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Reshape:
    """Another shape for the same elements; with `expand`, dimensions of size 1 are repeated instead. -1: as it is."""

    source: Slot
    shape: tuple[int | Cut, ...]
    expand: bool


@dataclass(frozen=True)
class Triangle:
    """Zero below (`upper`) or above the diagonal: column - row against `diagonal`, over the last two dimensions."""

    source: Slot
    rows: Cut
    columns: Cut
    upper: bool
    diagonal: int | Slot


@dataclass(frozen=True)
class Lookup:
    """`source[indices]`; None keeps a dimension. The source is a Read, whole along the indexed dimensions."""

    source: Slot
    indices: tuple[Slot | None, ...]


@dataclass(frozen=True)
class Call:
    """An op that treats every element, or every dimension without a cut, on its own.

    `dtype` is the result's; operands are brought to `common` before they meet.
    """

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    dtype: torch.dtype
    common: torch.dtype


Step = Read | Fill | Count | Reshape | Triangle | Lookup | Call


@dataclass(frozen=True)
class BlockProgram:
    """Computes a block [rows or 1, heads or 1, query tokens, key tokens] of a mask from light values.

    `inputs` are the graph's nodes whose whole values are supplied, in this order. The last step's result has the
    mask's own dimensions, cut by `cuts`. Of the inputs `zero_or_one` (their places), other values must be refused.
    """

    inputs: tuple[fx.Node, ...]
    steps: tuple[Step, ...]
    output: Slot
    cuts: Cuts
    query_dim: int
    key_dim: int
    dtype: torch.dtype
    device: torch.device
    zero_or_one: tuple[int, ...] = ()

    def __str__(self) -> str:
        lines = [f"inputs: {', '.join(node.name for node in self.inputs)}"]
        lines += [f"%{index} = {_text(step)}" for index, step in enumerate(self.steps)]
        return "\n".join([*lines, f"return {self.output}: {_text(self.cuts)}"])


def _text(value: object) -> str:
    match value:
        case tuple() | list():
            return "[" + ", ".join(_text(item) for item in value) + "]"
        case None:
            return ":"
        case Read():
            return f"read input {value.input} {_text(value.cuts)}"
        case Fill():
            return f"fill {_text(value.shape)} with {value.value}"
        case Count():
            return f"count {value.cut} from {value.start} by {value.step}"
        case Reshape():
            return f"{'expand' if value.expand else 'reshape'} {value.source} to {_text(value.shape)}"
        case Triangle():
            return f"{'triu' if value.upper else 'tril'} {value.source} at {value.diagonal}"
        case Lookup():
            return f"{value.source}{_text(value.indices)}"
        case Call():
            named = "".join(f", {name}={_text(item)}" for name, item in value.kwargs.items())
            return f"{value.op}({', '.join(_text(item) for item in value.args)}{named})"
        case _:
            return str(value)
