"""Models that are spread over processes or devices: longstraw runs in one process, on one device, and says so."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import fx, nn

from longstraw import compat
from longstraw.errors import SeveralProcesses

_REPLICATED = (("torch.nn.parallel.distributed", "DistributedDataParallel"),)
_SHARDED = (
    ("torch.distributed.fsdp", "FSDPModule"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel"),
    ("torch.distributed.tensor", "DTensor"),
)


def refuse_parallel(gm: fx.GraphModule) -> None:
    """Refuse a graph that Dynamo has cut for its distributed wrapper, or that has parameters that are spread."""
    if compat.is_part_for_ddp():
        raise SeveralProcesses("The model", "DistributedDataParallel")
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        if node.op == "placeholder" and isinstance(value, torch.Tensor):
            _refuse(compat.source_name(node), value, _SHARDED)


def refuse_parallel_models(values: Iterable[Any], *, replicated: bool = True) -> None:
    """Refuse values among which are models with parameters that are spread.

    Args:
        values: modules, what has them as attributes, and others.
        replicated: whether models that are replicated are refused, too.
    """
    names = (*_SHARDED, *(_REPLICATED if replicated else ()))
    for value in values:
        for part in _parts(value):
            _refuse("The model", part, names)


def held(step: Callable[..., Any]) -> list[nn.Module]:
    """Return the modules that a step reaches otherwise than by its arguments."""
    if isinstance(step, functools.partial):
        values = [*step.args, *step.keywords.values()]
        return [*(value for value in values if isinstance(value, nn.Module)), *held(step.func)]
    owner = getattr(step, "__self__", None)
    values = [owner, *getattr(owner, "__dict__", {}).values()]
    if inspect.isroutine(step):
        with contextlib.suppress(TypeError, ValueError):  # built in, or with a name that has no value yet
            read = inspect.getclosurevars(inspect.unwrap(step))
            values += [*read.nonlocals.values(), *read.globals.values()]
    return [value for value in values if isinstance(value, nn.Module)]


def _parts(value: Any) -> Iterator[Any]:
    """Yield modules and parameters of a value, which may be a module or have one as an attribute."""
    if not isinstance(value, nn.Module):
        held = getattr(value, "__dict__", None)
        for module in list(held.values()) if isinstance(held, dict) and not isinstance(value, type) else ():
            if isinstance(module, nn.Module):
                yield from _parts(module)
        return
    yield from value.modules()
    yield from value.parameters()


def _known(names: Iterable[tuple[str, str]]) -> tuple[type, ...]:
    """Return the classes of these names whose modules are imported: nothing can be of others."""
    return tuple(getattr(sys.modules[m], name) for m, name in names if hasattr(sys.modules.get(m), name))


def _refuse(name: str, value: Any, names: Iterable[tuple[str, str]]) -> None:
    kinds = [kind for kind in _known(names) if isinstance(value, kind)]
    if kinds:
        raise SeveralProcesses(name, kinds[0].__name__)
