"""verify: the compiled step against eager, on the user's own input."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from longstraw.explain import Recorder
from longstraw.options import Options
from longstraw.parallel import held, refuse_parallel_models

_SLACK = 50.0
_LOOSEST = 0.1


@dataclass(frozen=True)
class Parity:
    """How close a compiled step comes to eager.

    Attributes:
        eager_loss, loss: both losses.
        loss_error: their relative difference.
        cosine: of all gradients as one vector.
        relative_l2: norm of the difference of all gradients over the norm of eager's.
        worst: name and relative L2 error of the gradient that differs most (measured against 1e-4 of the largest
            gradient norm where its own is smaller, for a gradient that is zero but for rounding).
        missing: gradients that exist on one side only.
        tolerance: what `ok` compares with, from the coarsest dtype that the step computes in.
    """

    eager_loss: float
    loss: float
    loss_error: float
    cosine: float
    relative_l2: float
    worst: tuple[str, float]
    missing: tuple[str, ...]
    tolerance: float
    prompt_grad: str

    @property
    def ok(self) -> bool:
        """Whether loss and gradients equal eager's to rounding."""
        same = self.loss_error <= self.tolerance and self.relative_l2 <= self.tolerance
        return same and self.worst[1] <= self.tolerance and not self.missing

    def __str__(self) -> str:
        rows = [
            ("loss", f"{self.loss:.10g}", f"eager {self.eager_loss:.10g}, relative error {self.loss_error:.1e}"),
            ("gradients", f"{self.relative_l2:.1e}", f"relative L2 error; cosine {self.cosine:.12f}"),
            ("worst", f"{self.worst[1]:.1e}", self.worst[0]),
            ("verdict", "equal" if self.ok else "DIFFERENT", f"tolerance {self.tolerance:.0e}"),
        ]
        rows += [("missing", "", name) for name in self.missing]
        if self.prompt_grad == "none":
            rows.append(
                ("note", "", 'prompt_grad="none" leaves out the prompt\'s part of the gradient: this is its price')
            )
        return "\n".join(f"{name:<10} {value:>16}  {text}" for name, value, text in rows)


def verify(
    step: Callable[..., Any], *args: Any, options: Options | Mapping[str, Any] | None = None, **kwargs: Any
) -> Parity:
    """Run a step eager and compiled on the same input and compare loss and gradients.

    Parameters, their `.grad`, buffers, tensors among the arguments, and the random state are left as they were. Models
    are looked for in the arguments, in what the step is a method of, and among the names that its code reads. The step
    must return its loss: alone, first in a tuple, or under "loss"; it may also call backward itself. Eager needs the
    memory that eager needs: use a short prompt.

    Args:
        step: the step, or what `torch.compile` returned for it, whose options are not read.
        *args, **kwargs: its arguments.
        options: as for `torch.compile(..., options=...)`.

    Raises:
        ValueError: the step returns no loss, or no parameter got a gradient.
    """
    chosen = Options.of(options)
    step = getattr(step, "_torchdynamo_orig_callable", step)
    found_values = [*pytree.tree_leaves((args, kwargs)), *held(step)]
    refuse_parallel_models(found_values, replicated=False)
    leaves = dict(_leaves(found_values))
    saved = _Saved(found_values, leaves)
    random = torch.get_rng_state()
    torch._dynamo.reset()
    try:
        eager_loss, expected = _run(step, args, kwargs, leaves)
        saved.restore()
        torch.set_rng_state(random)
        recorder = Recorder(chosen)
        loss, found = _run(torch.compile(step, backend=recorder), args, kwargs, leaves)
    finally:
        saved.restore()
        torch.set_rng_state(random)
        torch._dynamo.reset()
    return _compare(eager_loss, loss, expected, found, leaves, chosen.prompt_grad, _precision(recorder, leaves))


def _precision(recorder: Recorder, leaves: Mapping[str, Tensor]) -> float:
    """Return the machine epsilon of the coarsest float dtype that the step computes in."""
    dtypes = {leaf.dtype for leaf in leaves.values()}
    for program in recorder.programs:
        located = program.step.partitioned.step
        values = (node.meta.get("val") for node in located.layouts)
        dtypes |= {value.dtype for value in values if isinstance(value, Tensor) and value.is_floating_point()}
    return max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)


def _leaves(values: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor that can get a gradient, with a name; what several models have is numbered."""
    seen: set[int] = set()
    used: set[str] = set()
    models = 0
    for i, value in enumerate(values):
        if isinstance(value, torch.nn.Module):
            new = [(name, x) for name, x in value.named_parameters() if id(x) not in seen]
            models += bool(new)
            for name, parameter in new:
                seen.add(id(parameter))
                unique = f"{name} (of model {models})" if name in used else name
                used.add(unique)
                yield unique, parameter
        elif isinstance(value, Tensor) and value.requires_grad and value.is_leaf:
            yield f"input {i}", value


class _Saved:
    """What a step may change, as it was.

    Args:
        values: tensors and modules.
        leaves: those that can get a gradient, by name.
    """

    def __init__(self, values: Sequence[Any], leaves: Mapping[str, Tensor]) -> None:
        modules = [part for value in values if isinstance(value, torch.nn.Module) for part in value.modules()]
        self._buffers = [(part, name, x) for part in modules for name, x in part.named_buffers(recurse=False)]
        tensors = [*(x for *_, x in self._buffers), *(x for x in values if isinstance(x, Tensor)), *leaves.values()]
        self._data = [(x, x.detach().clone()) for x in tensors]
        self._grads = [(x, x.grad) for x in leaves.values()]

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back."""
        for part, name, buffer in self._buffers:
            setattr(part, name, buffer)
        for tensor, value in self._data:
            if not torch.equal(tensor, value):
                tensor.copy_(value)
        for leaf, grad in self._grads:
            leaf.grad = grad


def _run(
    step: Callable[..., Any], args: Any, kwargs: Any, leaves: Mapping[str, Tensor]
) -> tuple[float, dict[str, Tensor | None]]:
    for leaf in leaves.values():
        leaf.grad = None
    loss = _loss(step(*args, **kwargs))
    if loss.requires_grad:
        loss.backward()
    return float(loss.detach()), {name: leaf.grad for name, leaf in leaves.items()}


def _loss(returned: Any) -> Tensor:
    loss = returned
    if isinstance(returned, Mapping):
        loss = returned.get("loss")
    elif isinstance(returned, (tuple, list)):
        loss = returned[0] if returned else None
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ValueError('The step must return its loss: alone, first in a tuple, or under the key "loss".')
    return loss


def _compare(
    eager_loss: float,
    loss: float,
    expected: Mapping[str, Tensor | None],
    found: Mapping[str, Tensor | None],
    leaves: Mapping[str, Tensor],
    prompt_grad: str,
    eps: float,
) -> Parity:
    both = {
        n: (e.double(), f.double()) for n in leaves if (e := expected[n]) is not None and (f := found[n]) is not None
    }
    if not both:
        raise ValueError(
            "No parameter got a gradient from the step: there is nothing to compare. Pass the model as an argument of "
            "the step, or let the step be a method of what has it."
        )
    missing = tuple(n for n in leaves if (expected[n] is None) != (found[n] is None))
    floor = 1e-4 * max(float(e.norm()) for e, _ in both.values())
    errors = {n: float((f - e).norm()) / max(float(e.norm()), floor, 1e-300) for n, (e, f) in both.items()}
    worst = max(errors, key=lambda name: errors[name])
    norm = sum(float(e.square().sum()) for e, _ in both.values()) ** 0.5
    other = sum(float(f.square().sum()) for _, f in both.values()) ** 0.5
    dot = sum(float((e * f).sum()) for e, f in both.values())
    difference = sum(float((f - e).square().sum()) for e, f in both.values()) ** 0.5
    return Parity(
        eager_loss,
        loss,
        abs(loss - eager_loss) / max(abs(eager_loss), 1e-300) if loss != eager_loss else 0.0,
        dot / max(norm * other, 1e-300),
        difference / max(norm, 1e-300),
        (worst, errors[worst]),
        missing,
        min(_SLACK * eps**0.75, _LOOSEST),
        prompt_grad,
    )
