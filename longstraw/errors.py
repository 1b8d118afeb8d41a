"""Every error that longstraw raises on purpose: what happened, where in the user's code, what to do.

Errors about the user's program derive from `LongstrawError` and from the built-in error that fits (`ValueError`,
`RuntimeError`, `NotImplementedError`), so that both `except LongstrawError` and ordinary handlers work.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import torch

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\n\s*(?P<code>.*)')


class LongstrawError(Exception):
    """Base of all errors that longstraw raises on purpose.

    Args:
        what: what happened.
        where: the user's source line, or "" when no line is to blame.
        remedy: what to do about it.
    """

    def __init__(self, what: str, *, where: str = "", remedy: str = "") -> None:
        self.what, self.where, self.remedy = what, where, remedy
        text = what
        if where:
            text += f"\n  at {where}"
        if remedy:
            text += f"\n  {remedy}"
        super().__init__(text)


class OptionsError(LongstrawError, ValueError):
    """An option is unknown or has a value that it can't have."""


class BadInput(LongstrawError, ValueError):
    """The tensors given to the compiled step can't be run: empty, or on several devices."""


class SeveralProcesses(LongstrawError, NotImplementedError):
    """The model is replicated or spread over processes or devices.

    Args:
        name: which.
        kind: the class that does it.
    """

    def __init__(self, name: str, kind: str) -> None:
        whole = "Pass the plain module, with whole parameters on one device"
        super().__init__(
            f"{name} is a {kind}: longstraw runs in one process and on one device, and rows of other processes are not "
            "known to it.",
            remedy=f"{'Pass model.module' if kind == 'DistributedDataParallel' else whole}, and reduce the gradients "
            "yourself after backward: torch.distributed.all_reduce(p.grad) for each parameter p.",
        )


class UnsupportedOp(LongstrawError, NotImplementedError):
    """An op meets the token dim in a way that no rule covers."""


class MixesRows(LongstrawError, NotImplementedError):
    """An op makes one row's values depend on another row's before the results."""


class MixesTokens(LongstrawError, NotImplementedError):
    """An op makes one token's values depend on other tokens', and no rule says what state it needs."""


class UnsupportedMask(LongstrawError, NotImplementedError):
    """An attention mask can't be cut into blocks of queries and keys."""


class WideResult(LongstrawError, NotImplementedError):
    """A value with a hidden or vocabulary dim leaves the model: hidden states, logits, or a loss on them."""


class ModelSplit(LongstrawError, RuntimeError):
    """Dynamo broke the step inside the model, so that the backend sees only a piece of it."""


class DropoutActive(LongstrawError, ValueError):
    """A dropout with p > 0 is active: scoring and replay would draw different masks."""


class PromptNotFound(LongstrawError, ValueError):
    """`prompt_grad="none"` needs to know where the prompt ends, and the step computes results for every token."""


SHORT_ROW = 4
"""Dynamo takes sizes of 1 for constants, and so the length of a row of very few tokens. There is nothing to save in
such a row: a step's graph runs as it was traced."""


class StaticTokens(LongstrawError, NotImplementedError):
    """The token dim could not be traced with a symbolic size.

    Args:
        tokens: the size that it was traced with.
        where: the user's source line.
        remedy: what to do, where the op that made it a constant is known.
    """

    def __init__(self, tokens: int, *, where: str, remedy: str | None = None) -> None:
        self.tokens = tokens
        loops = (
            "The model's code turns the length into a Python number or loops over tokens, as recurrent models do: name "
            "the function that loops with Options(rules=(longstraw.Scan(...),)). Lengths must stay symbolic."
        )
        super().__init__(
            f"The number of tokens of a row was traced as the constant {tokens}.",
            where=where,
            remedy=remedy or loops
            if tokens > SHORT_ROW
            else "Rows this short are run as they were traced: use longer ones here.",
        )


class CompiledTooOften(LongstrawError, RuntimeError):
    """Dynamo has compiled the step as often as it may, and would run it eagerly from now on.

    Args:
        function: the name of the function that it would compile again.
        times: how often it may.
        limit: the name of Dynamo's setting.
        reason: what the newest compiled form asks for and this call does not have, or "" where that isn't known.
        where: where the function is.
    """

    def __init__(self, function: str, *, times: int, limit: str, reason: str, where: str) -> None:
        differs = f" The last one holds for {reason}." if reason else ""
        super().__init__(
            f"{function} was compiled {times} times, as often as torch._dynamo.config.{limit} allows, each time "
            f"because a value of Python's that it reads was another; now Dynamo would run it eagerly.{differs}",
            where=where,
            remedy="Pass what changes at each call as a tensor of no dims, torch.tensor(coefficient), and collect "
            "metrics outside of the step; TORCH_LOGS=recompiles shows every reason. To compare options on one "
            "function, call torch._dynamo.reset() in between.",
        )


class ModeActive(LongstrawError, RuntimeError):
    """A mode that sees every operator is active, under which Dynamo compiles nothing and runs the step eagerly.

    Args:
        function: the name of the function that it would run.
        modes: the classes of the modes.
        where: where the function is.
    """

    def __init__(self, function: str, *, modes: Sequence[str], where: str) -> None:
        super().__init__(
            f"{function} was called under {' and '.join(modes)}, a mode that sees every operator: Dynamo compiles "
            "nothing there and would run it eagerly, now and from now on.",
            where=where,
            remedy="Call the step outside of the mode; to count an eager step's operators, call the function that was "
            "given to torch.compile.",
        )


class ParametersChanged(LongstrawError, RuntimeError):
    """A parameter or an input was changed or replaced between the step's forward and its backward."""


class BackwardTwice(LongstrawError, RuntimeError):
    """Backward ran a second time through a step whose state was already released."""


class DoubleBackward(LongstrawError, RuntimeError):
    """A gradient of a gradient was asked for."""


class NumbersDiffer(LongstrawError, AssertionError):
    """`check="numbers"`: the compiled step doesn't compute what its graph computes."""


class MissingExtra(LongstrawError, ImportError):
    """An option needs a package that is not installed."""


class TierFull(LongstrawError, OSError):
    """There is no room for captured state where it was told to rest."""


class OutOfMemory(LongstrawError, torch.OutOfMemoryError):
    """The device's memory is full, and was with shorter spans, too."""


class BudgetTooSmall(LongstrawError, ValueError):
    """No plan of the step fits the memory budget."""


class StateMisuse(LongstrawError, RuntimeError):
    """Captured state was read when it may not be (released, hidden, not written), written to while others read it,
    released twice, or leaked."""


def user_line(stack_trace: str | None, *, own: bool = True) -> str:
    """Return `file:line in function: code` of the frame to show for a node.

    Args:
        stack_trace: a node's `stack_trace` meta, frames outermost first.
        own: prefer the innermost frame; False takes the outermost (the line of the user's step).
    """
    frames = list(_FRAME.finditer(stack_trace or ""))
    # Functions of torch itself, such as F.pad, and what is traced in place of a model's functions are nobody's line.
    libraries = (f"{os.sep}torch{os.sep}", os.path.dirname(__file__) + os.sep)
    frames = [frame for frame in frames if not any(library in frame["file"] for library in libraries)] or frames
    if not frames:
        return ""
    frame = frames[-1] if own else frames[0]
    return f"{function_line(frame['file'], frame['line'], frame['function'])}: {frame['code'].strip()}"


def function_line(path: str, line: int | str, function: str) -> str:
    """Return `file:line in function`, the file below the working directory where it is."""
    if path.startswith(os.getcwd() + os.sep):
        path = os.path.relpath(path)
    return f"{path}:{line} in {function}"
