"""The options of the backend: one frozen record, the same names in `torch.compile(..., options={...})`."""

from __future__ import annotations

import dataclasses
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from longstraw.errors import OptionsError

_GRAD_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Drift:
    """How far a step's values from a reused prompt are from those of a fresh capture, at the step that captures anew.

    Attributes:
        steps: since the reused prompt was captured.
        loss: relative difference of the step's first floating scalar output, or None when it has none.
        log_prob: mean absolute difference of the numbers that leave the model for each token that the loss reads, such
            as log-probabilities (of several passes of the model, the largest).
    """

    steps: int
    loss: float | None
    log_prob: float

    def __str__(self) -> str:
        loss = "" if self.loss is None else f"the loss differs by {self.loss:.2%}, "
        log_prob = f"log-probabilities by {self.log_prob:.3g} on average"
        return f"drift of a prompt captured {self.steps} steps ago: {loss}{log_prob}"


@dataclass(frozen=True)
class Options:
    """How a step is rewritten and run.

    Attributes:
        prompt_grad: "exact" computes eager's gradients; "none" counts the prompt's state as a constant (the published
            response-only scheme): cheaper, and another gradient.
        reuse_prompt_for: how many steps (calls) after its capture may read a prompt's state again, though the optimizer
            changed the parameters: cheaper, and an approximation. Only with `prompt_grad="none"`. A prompt is the run
            of tokens that all rows share; its state stays allocated between steps.
        on_drift: called with a `Drift` whenever a reused prompt is captured anew.
        span_tokens: tokens of a row executed at once in capture, replay and unwind, or "auto".
        replay_rows: responses replayed together, or "auto".
        boundary_every: unwind starts again at every how many-th span of the prompt from saved boundary states (those of
            recurrences and convolutions) and computes the ones between anew, or "auto": 1 until they take 256 MiB.
        state_tier: where captured state rests between the spans that read it: "device", "host" (pinned memory), or a
            folder for files. Results are the same, bit for bit.
        memory_budget: bytes on the device for weights, gradients and all that the step takes, as a number or as text
            such as "12GiB", or None: what is "auto" above, and a state_tier of "device" where host memory is another,
            are chosen so that the step's plan fits.
        page_tokens: tokens of a page, in which captured state is accounted for; a prefix that only some rows share is
            captured once when it has at least this many.
        grad_dtype: accumulation dtype of state and parameter gradients (never narrower than the tensor's own).
        inner_backend: what runs graphs without a model, and the segment graphs between their attentions: "eager",
            "inductor", or any torch.compile backend.
        rules: further architecture rules, tried before the built-in ones.
        progress: show a bar over spans (needs tqdm).
        check: "off", "structure" (invariants after every pass), or "numbers" (also compare with eager at first call).
    """

    prompt_grad: Literal["exact", "none"] = "exact"
    reuse_prompt_for: int = 0
    on_drift: Callable[[Drift], None] | None = None
    span_tokens: int | Literal["auto"] = "auto"
    replay_rows: int | Literal["auto"] = "auto"
    boundary_every: int | Literal["auto"] = "auto"
    state_tier: str = "device"
    memory_budget: int | str | None = None
    page_tokens: int = 64
    grad_dtype: torch.dtype = torch.float32
    inner_backend: str | Any = "eager"
    rules: tuple[Any, ...] = ()
    progress: bool = False
    check: Literal["off", "structure", "numbers"] = "structure"

    def __post_init__(self) -> None:
        _one_of("prompt_grad", self.prompt_grad, ("exact", "none"))
        _one_of("check", self.check, ("off", "structure", "numbers"))
        self._check_reuse()
        for name in ("span_tokens", "replay_rows", "boundary_every"):
            if getattr(self, name) != "auto":
                _positive(name, getattr(self, name), or_else=" or 'auto'")
        _positive("page_tokens", self.page_tokens)
        object.__setattr__(self, "memory_budget", _bytes(self.memory_budget))
        object.__setattr__(self, "state_tier", _tier(self.state_tier))
        if isinstance(self.grad_dtype, str):
            _one_of("grad_dtype", self.grad_dtype, tuple(_GRAD_DTYPES))
            object.__setattr__(self, "grad_dtype", _GRAD_DTYPES[self.grad_dtype])
        if not (isinstance(self.grad_dtype, torch.dtype) and self.grad_dtype.is_floating_point):
            raise OptionsError(f"grad_dtype={self.grad_dtype!r} is not a floating point dtype.")
        if not isinstance(self.progress, bool):
            raise OptionsError(f"progress={self.progress!r}: expected True or False.")
        if hasattr(self.rules, "target"):
            kind = type(self.rules).__name__
            raise OptionsError(
                f"rules is a {kind} itself: expected a tuple of rules.",
                remedy="Write rules=(rule,), with a comma: a tuple of one.",
            )
        if not isinstance(self.rules, Iterable) or not all(hasattr(rule, "target") for rule in self.rules):
            raise OptionsError(f"rules={self.rules!r}: expected a tuple, each a longstraw.Rule or a longstraw.Scan.")
        object.__setattr__(self, "rules", tuple(self.rules))
        if isinstance(self.inner_backend, str):
            known = [name for name in torch.compiler.list_backends(exclude_tags=()) if name != "longstraw"]
            if self.inner_backend not in known:
                raise OptionsError(
                    f"inner_backend={self.inner_backend!r}: there is no torch.compile backend of this name.",
                    remedy=f"Known ones: {', '.join(known)}; or a function.",
                )
        elif not callable(self.inner_backend):
            raise OptionsError(f"inner_backend={self.inner_backend!r}: expected the name of a backend, or a function.")

    def _check_reuse(self) -> None:
        _positive("reuse_prompt_for", self.reuse_prompt_for, or_else=", or 0 for never", least=0)
        if self.reuse_prompt_for and self.prompt_grad != "none":
            raise OptionsError(
                f"reuse_prompt_for={self.reuse_prompt_for} with prompt_grad={self.prompt_grad!r}: exact gradients flow "
                "into the prompt, through parameters that no longer are those its kept state was computed with.",
                remedy='Say prompt_grad="none" (gradients of the responses alone), or leave reuse_prompt_for at 0.',
            )
        if not (self.on_drift is None or callable(self.on_drift)):
            raise OptionsError(f"on_drift={self.on_drift!r}: expected a function of a longstraw.Drift, or None.")

    @classmethod
    def of(cls, given: Options | Mapping[str, Any] | None) -> Options:
        """Return the record for what a user gave: a record, a mapping of names, or nothing."""
        if given is None:
            return cls()
        if isinstance(given, Options):
            return given
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise OptionsError(
                f"Unknown option{'s' if len(unknown) > 1 else ''} {', '.join(map(repr, unknown))}.",
                remedy=f"Known options: {', '.join(known)}.",
            )
        return cls(**given)


def _tier(value: object) -> str:
    """Return "device", "host", or the path of a folder that files can be made in."""
    if value in ("device", "host"):
        return str(value)
    folder = os.path.expanduser(os.fspath(value)) if isinstance(value, str | os.PathLike) else None
    if folder is None or not os.path.isdir(folder):
        raise OptionsError(f"state_tier={value!r}: expected 'device', 'host', or a folder that exists.")
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise OptionsError(f"state_tier={value!r}: files can't be made in this folder: {error.strerror}.") from error
    return os.path.abspath(folder)


def _bytes(value: object) -> int | None:
    """Return a number of bytes that is given as one, or as text with a unit."""
    if isinstance(value, str):
        parts = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?)?B\s*", value, re.IGNORECASE)
        if parts is None:
            raise OptionsError(f"memory_budget={value!r}: expected a number and a unit, such as '12GiB' or '800MB'.")
        unit = (parts[2] or "").lower()
        scale = (1024 if unit.endswith("i") else 1000) ** " kmgt".index(unit[:1] or " ")
        value = int(float(parts[1]) * scale)
    if value is not None:
        _positive("memory_budget", value, or_else=", the number of bytes, or text such as '12GiB'")
    return value  # type: ignore[return-value]


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise OptionsError(f"{name}={value!r}: expected one of {', '.join(map(repr, allowed))}.")


def _positive(name: str, value: object, *, or_else: str = "", least: int = 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise OptionsError(f"{name}={value!r}: expected a positive integer{or_else}.")
