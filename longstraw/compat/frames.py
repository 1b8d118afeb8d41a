"""The frames that Dynamo compiles: for which backend, how often, and what the user calls their values."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FrameType
from typing import Any

import torch
import torch._dynamo
from torch import fx
from torch._dynamo import convert_frame
from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import longstraw.errors
from longstraw.errors import CompiledTooOften, ModeActive, function_line


def refuse_at_the_limit() -> None:
    """Raise where Dynamo has compiled a frame for a backend of ours as often as it may, and would run it eagerly.

    That holds for frames that ran a model, themselves or in what they call; metrics may be computed eagerly.
    """
    exceeds = convert_frame.exceeds_recompile_limit  # type: ignore[attr-defined]

    def checked(*args: Any, **kwargs: Any) -> tuple[bool, str]:
        exceeded, limit = exceeds(*args, **kwargs)
        compiling = _compiling()
        if exceeded and compiling is not None and _place(compiling["code"]) in frames_with_model:
            backend, _ = backend_being_compiled_for()
            if getattr(backend, "traces_backward", False):
                code = compiling["code"]
                raise CompiledTooOften(
                    code.co_name,
                    times=int(getattr(torch._dynamo.config, limit)),
                    limit=limit,
                    reason=_failed_guard(str(compiling.get("recompile_reason") or "")),
                    where=function_line(code.co_filename, code.co_firstlineno, code.co_name),
                )
        return exceeded, limit

    convert_frame.exceeds_recompile_limit = checked  # type: ignore[attr-defined]


def refuse_under_modes() -> None:
    """Raise where Dynamo would run a frame for a backend of ours eagerly, because a dispatch mode is active.

    That holds for what may run a model: compiled functions that are called, the rest of one after a break of its graph,
    and modules; what else they call there (logging, hooks) Dynamo may run as it is.
    """
    for name in ("is_in_any_mode_without_ignore_compile_internals", "any_torch_dispatch_mode_on_stack"):
        if hasattr(convert_frame, name):
            setattr(convert_frame, name, _refusing(getattr(convert_frame, name)))


def _refusing(is_in_mode: Callable[[], bool]) -> Callable[[], bool]:
    def checked() -> bool:
        found = is_in_mode()
        asking = sys._getframe(1)
        if found and not asking.f_locals.get("is_skipfile", True):
            backend, _ = _innermost(asking.f_locals["self"])
            if getattr(backend, "traces_backward", False) and _may_run_model(asking.f_locals["frame"], asking.f_back):
                codes = [asking.f_locals["frame"].f_code, *(frame.f_code for frame in _stack())]
                code = next((c for c in codes if not c.co_filename.startswith((_TORCH, _OURS))), codes[0])
                modes = [type(mode).__name__ for mode in _get_current_dispatch_mode_stack()]
                where = function_line(code.co_filename, code.co_firstlineno, code.co_name)
                raise ModeActive(codes[0].co_name, modes=modes, where=where)
        return found

    return checked


_TORCH, _OURS = (os.path.join(os.path.dirname(str(m.__file__)), "") for m in (torch, longstraw.errors))


def _may_run_model(called: Any, caller: FrameType | None) -> bool:
    """Return whether a frame that was called may run a model; `called` is what Dynamo knows of it before it runs."""
    is_compiled = caller is not None and caller.f_globals.get("__name__") == "torch._dynamo.eval_frame"
    code, of = called.f_code, called.f_locals.get("self")
    is_rest = code.co_name.startswith(TORCH_DYNAMO_RESUME_IN_PREFIX)
    return is_compiled or is_rest or isinstance(of, torch.nn.Module) or _place(code) in frames_with_model


def _failed_guard(reason: str) -> str:
    """Return what a guard asked, as the user would write it, without the number of the compilation."""
    first = next(iter(reason.strip().splitlines()), "")
    return users_expression(re.sub(r"^\d+/\d+: ", "", first).split("  # ")[0].strip())


frames_with_model: set[tuple[str, str, int]] = set()


def _place(code: CodeType) -> tuple[str, str, int]:
    """Return what Dynamo's code for a function and the function's own have in common."""
    return code.co_filename, code.co_name, code.co_firstlineno


def _stack() -> Iterator[FrameType]:
    """Yield the frames that are running, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _compiling() -> Mapping[str, Any] | None:
    """Return what Dynamo knows of the frame that is being compiled, found on the stack."""
    known = {"code", "compiler_fn", "compile_id"}
    return next((dict(frame.f_locals) for frame in _stack() if known <= frame.f_locals.keys()), None)


def remember_model() -> None:
    """Note that the frame that is being compiled runs a model, and so do those that called it."""
    compiling = _compiling()
    if compiling is not None:
        frames_with_model.update(_place(code) for code in (compiling["code"], *(frame.f_code for frame in _stack())))


def values_in_reach() -> list[Any]:
    """Return what the frame that is being compiled reads by name, what the part of it that ran before had, and the
    objects whose methods are running.
    """
    compiling = _compiling()
    if compiling is None:
        return []
    code: CodeType = compiling["code"]
    values = [*compiling["locals"].values(), *(compiling["globals"].get(name) for name in code.co_names)]
    for frame in _stack():
        if (frame.f_code.co_filename, frame.f_code.co_firstlineno) == (code.co_filename, code.co_firstlineno):
            values += frame.f_locals.values()
        elif "self" in frame.f_locals:
            values.append(frame.f_locals["self"])
    return values


def is_part_for_ddp() -> bool:
    """Return whether Dynamo compiles a part of a graph that it has cut for DistributedDataParallel."""
    return any(frame.f_globals.get("__name__") == "torch._dynamo.backends.distributed" for frame in _stack())


def backend_being_compiled_for() -> tuple[Callable[..., Any] | None, Any]:
    """Return the innermost backend function of the compilation in progress, found on the stack, and its options."""
    return _innermost(
        next((frame.f_locals["compiler_fn"] for frame in _stack() if "compiler_fn" in frame.f_locals), None)
    )


def _innermost(found: Callable[..., Any] | None) -> tuple[Callable[..., Any] | None, Any]:
    """Return the backend function in wrappers of Dynamo's, and its options."""
    options = None
    while found is not None:
        keywords = getattr(found, "kwargs", None) or getattr(found, "keywords", None) or {}
        options = options or getattr(found, "options", None) or keywords.get("options")
        wrapped = [
            getattr(found, name)
            for name in ("_torchdynamo_orig_backend", "compiler_fn", "func")
            if hasattr(found, name)
        ]
        if not wrapped:
            break
        found = wrapped[0]
    return found, options


def source_name(placeholder: fx.Node) -> str:
    """Return the expression, as a user writes it, of the value that Dynamo lifted into this placeholder."""
    argument = placeholder.meta.get("grapharg")
    source = getattr(argument, "source", None)
    name = getattr(source, "name", None)
    if name is None:
        return placeholder.name
    return users_expression(str(name() if callable(name) else name))


def users_expression(written: str) -> str:
    """Return Dynamo's expression for a value of the user's, such as `L['model'].head`, as the user would write it."""
    written = re.sub(r"\b[LG]\['(\w+)'\]", r"\1", written)
    written = re.sub(r"\.__dict__\['(\w+)'\]", r".\1", written)
    return re.sub(r"\._(?:modules|parameters|buffers)\['(\w+)'\]", r".\1", written)
