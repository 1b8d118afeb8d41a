"""Stages as Python that runs: every graph of a record as a function, with what each value runs over as comments."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from longstraw.layout import Counts, Rows, Shuffled, Tokens
from longstraw.stages import Branched, Located, Lowered, Normalised, Partitioned, Traced, WithState

_ASSIGNED = re.compile(r"^    (\w+) = ")
_SHOWN_CONSTANT = 64


def render(record: Any) -> str:
    """Return a stage's graphs as one Python source text."""
    imports: set[str] = {"import torch"}
    parts = [_source(name, module, notes, imports) for name, module, notes in _graphs(record)]
    return "\n\n\n".join(["\n".join(sorted(imports)), *parts]) + "\n"


def _graphs(record: Any) -> Iterator[tuple[str, fx.GraphModule, dict[str, str]]]:
    match record:
        case Traced() | Normalised():
            yield "step", record.module, {}
        case Branched():
            yield "step", record.module, {node.name: kind for node, kind in record.kinds.items()}
        case Located():
            yield "step", record.module, {n.name: describe(layout) for n, layout in record.layouts.items()}
        case Partitioned():
            for i, segment in enumerate(record.segments):
                yield f"branch_{i}_body", segment.body.module, _layouts(segment.body.module)
                for j, head in enumerate(segment.heads):
                    yield f"branch_{i}_head_{j}", head.graph.module, _layouts(head.graph.module)
            yield "objective", record.objective, {}
            if record.reads is not None:
                yield "reads", record.reads, {}
        case WithState():
            for i, branch in enumerate(record.branches):
                for name in ("capture", "score", "relay"):
                    module = getattr(branch, name)
                    yield f"branch_{i}_{name}", module, _layouts(module)
        case Lowered():
            yield "prologue", record.prologue, {}
            yield from _graphs(record.step)
            for i, branch in enumerate(record.step.branches):
                for j, head in enumerate(branch.segment.heads):
                    yield f"branch_{i}_head_{j}", head.graph.module, _layouts(head.graph.module)
            yield "objective", record.step.partitioned.objective, {}
        case _:
            raise TypeError(f"{type(record).__name__} is not a stage's record")


def _layouts(module: fx.GraphModule) -> dict[str, str]:
    return {n.name: describe(n.meta["layout"]) for n in module.graph.nodes if n.meta.get("layout")}


def describe(layout: Any) -> str:
    """Return a layout in words, such as `rows, tokens, 64`."""
    if (
        layout
        and layout[0]
        and isinstance(layout[0][0], tuple)
        and layout[0][0]
        and not isinstance(layout[0][0][0], int)
    ):
        return " | ".join(describe(one) for one in layout)
    return ", ".join("*".join(_factor(f) for f in dim) or "1" for dim in layout)


def _factor(factor: Any) -> str:
    match factor:
        case Rows():
            return "rows"
        case Tokens(start, stop):
            return f"tokens[{start}:{stop}]"
        case Shuffled(_, of):
            return f"shuffled({'*'.join(_factor(f) for f in of)})"
        case Counts(_, size):
            return f"counts {size[0]}"
        case (a, b):
            return str(a) if a == b else "symbolic"
    return str(factor)


def _source(name: str, module: fx.GraphModule, notes: dict[str, str], imports: set[str]) -> str:
    """Return one graph as a function `name(*inputs)`; add what it needs to `imports`."""
    code = module.graph.python_code("self")
    lines = []
    for line in code.src.strip().splitlines():
        found = _ASSIGNED.match(line)
        note = notes.get(found[1]) if found else None
        lines.append(f"{line}  # {note}" if note else line)
    body = "\n".join(lines)
    body = re.sub(r"^def forward\(self,? ?", f"def {name}(", body, count=1, flags=re.M)
    used = set(re.findall(r"[A-Za-z_]\w*", body))
    imports |= {_import(key, value) for key, value in code.globals.items() if key in used}
    constants = _constants(name, module, imports) if "self." in body else []
    body = body.replace("self.", f"{name}_constants.")
    return "\n".join([*constants, *([""] if constants else []), body])


def _import(alias: str, value: Any) -> str:
    if isinstance(value, types.ModuleType):
        return (
            f"import {value.__name__} as {alias}"
            if "." in value.__name__ or alias != value.__name__
            else f"import {alias}"
        )
    if alias in ("inf", "nan"):
        return f'{alias} = float("{alias}")'
    if alias == "NoneType":
        return "NoneType = type(None)"
    module, name = getattr(value, "__module__", None), getattr(value, "__name__", None)
    if not module or not name:
        return f"# {alias} = {value!r}"
    module = {"_operator": "operator"}.get(module, module)
    return f"from {module} import {name} as {alias}" if name != alias else f"from {module} import {name}"


def _constants(name: str, module: fx.GraphModule, imports: set[str]) -> list[str]:
    imports.add("import types")
    lines = [f"{name}_constants = types.SimpleNamespace()"]
    for node in module.graph.nodes:
        if node.op != "get_attr":
            continue
        value = getattr(module, str(node.target))
        target = f"{name}_constants.{node.target}"
        if isinstance(value, torch.Tensor):
            small = value.numel() <= _SHOWN_CONSTANT
            shown = (
                f"torch.tensor({value.tolist()}, dtype={value.dtype})" if small else f"torch.empty({list(value.shape)})"
            )
            lines.append(f"{target} = {shown}")
        elif isinstance(value, fx.GraphModule):
            function = f"{name}_{node.target}"
            lines += [_source(function, value, {}, imports), f"{target} = {function}"]
    return lines
