"""Whether a compiled step equals eager: every output, every gradient, every parameter after the step."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.steps import Step

# A tensor whose norm is below this share of all of its kind together (a key's bias has no gradient but rounding)
# is measured against that share.
FLOOR = 1e-4


@dataclass(frozen=True)
class Run:
    """What one run of a step left behind."""

    outputs: dict[str, object]
    gradients: dict[str, Tensor | None]
    parameters: dict[str, Tensor]


@dataclass(frozen=True)
class Comparison:
    """Relative L2 errors by name, and what is there on one side only."""

    outputs: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, float] = field(default_factory=dict)
    parameters: dict[str, float] = field(default_factory=dict)
    mismatches: tuple[str, ...] = ()

    @property
    def errors(self) -> dict[str, float]:
        """All errors by kind and name."""
        return {
            f"{kind} {name}": error
            for kind in ("outputs", "gradients", "parameters")
            for name, error in getattr(self, kind).items()
        }

    @property
    def worst(self) -> float:
        """The largest error."""
        return max(self.errors.values(), default=0.0)

    def describe(self, count: int = 5) -> str:
        """The mismatches and the largest errors, one a line."""
        largest = sorted(self.errors.items(), key=lambda item: -item[1])[:count]
        return "\n".join([*self.mismatches, *(f"{error:.3e}  {name}" for name, error in largest)])


def compare(
    step: Step | Callable,
    model: nn.Module,
    inputs: Mapping[str, object],
    *,
    backend: str | Callable = "longstraw",
    options: Mapping[str, object] | None = None,
    prompt_grad: str = "exact",
    reference: Step | Callable | None = None,
    fullgraph: bool = False,
) -> Comparison:
    """Run `step` eager and compiled, on copies of `model` and `inputs`.

    With ``prompt_grad="none"``, `reference` is the eager step that computes what is expected.
    """
    if prompt_grad == "none" and reference is None:
        raise ValueError("prompt_grad='none' differs from eager: pass the step that computes the same as `reference`")
    step = step if isinstance(step, Step) else Step(step)
    reference = step if reference is None else reference if isinstance(reference, Step) else Step(reference)
    options = dict(options or {})
    if backend == "longstraw":
        options["prompt_grad"] = prompt_grad
        options.setdefault("grad_dtype", torch.float64)
    torch._dynamo.reset()
    compiled = torch.compile(step.function, backend=backend, fullgraph=fullgraph, options=options or None)
    got = run(dataclasses.replace(step, function=compiled), model, inputs)
    torch._dynamo.reset()
    return difference(run(reference, model, inputs), got)


def assert_equal(comparison: Comparison, rtol: float = 1e-10) -> None:
    """Fail with the worst names unless every error is at most `rtol` (and no NaN)."""
    good = not comparison.mismatches and all(error <= rtol for error in comparison.errors.values())
    assert comparison.errors, "nothing was compared"
    assert good, f"differs from eager by more than {rtol:g}:\n{comparison.describe()}"


def eager_row_by_row_error(step: Step | Callable, model: nn.Module, inputs: Mapping[str, object]) -> float:
    """How much eager differs from itself when the model runs one row at a time.

    About 1e-15 for a model in float64. A float32 norm inside one doesn't show here: it rounds each row's gradient
    alone either way.
    """
    step = step if isinstance(step, Step) else Step(step)
    whole = run(step, model, inputs)

    def by_rows(model: nn.Module, **inputs: object) -> object:
        return step.function(RowByRow(model), **inputs)

    return difference(whole, run(dataclasses.replace(step, function=by_rows), model, inputs)).worst


def tolerance(step: Step | Callable, model: nn.Module, inputs: Mapping[str, object], rtol: float = 1e-10) -> float:
    """`rtol`, or ten times what eager differs from itself by (for steps in float32 and bfloat16)."""
    return max(rtol, 10 * eager_row_by_row_error(step, model, inputs))


class RowByRow(nn.Module):
    """A model that runs its rows one after the other."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def __getattr__(self, name: str) -> object:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def forward(self, input_ids: Tensor | None = None, **kwargs: object) -> SimpleNamespace:
        rows = {**kwargs, "input_ids": input_ids} if input_ids is not None else kwargs
        size = next(rows[name] for name in ("input_ids", "inputs_embeds") if name in rows).shape[0]

        def row(index: int) -> dict[str, object]:
            return {
                name: value[index : index + 1] if isinstance(value, Tensor) and value.shape[0] == size else value
                for name, value in rows.items()
            }

        return SimpleNamespace(logits=torch.cat([self.inner(**row(index)).logits for index in range(size)]))


def run(step: Step, model: nn.Module, inputs: Mapping[str, object]) -> Run:
    """Run a step on a copy of the model: `calls` times, backward where the caller runs it, gradients kept."""
    model = copy.deepcopy(model)
    model.zero_grad(set_to_none=True)
    step.prepare(model)
    inputs = {name: copy_of(value) for name, value in inputs.items()}
    if step.optimizer:
        inputs["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    outputs: dict[str, object] = {}
    for call in range(step.calls):
        with step.context():
            returned = step.function(model, **inputs)
        if step.backward == "caller":
            loss_of(returned).backward()
        for path, leaf in pytree.tree_flatten_with_path(returned)[0]:
            outputs[f"call {call}{pytree.keystr(path)}"] = leaf.detach().clone() if isinstance(leaf, Tensor) else leaf
    leaves = {f"input {k}": v for k, v in inputs.items() if isinstance(v, Tensor) and v.requires_grad}
    return Run(
        outputs,
        {name: tensor.grad for name, tensor in {**dict(model.named_parameters()), **leaves}.items()},
        {name: parameter.detach().clone() for name, parameter in model.named_parameters()},
    )


def copy_of(value: object) -> object:
    """A tensor input's own leaf; anything else as it is."""
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return value


def loss_of(returned: object) -> Tensor:
    """The loss in what a step returned: alone, first, or under "loss"."""
    if isinstance(returned, Mapping):
        return returned["loss"]
    return returned[0] if isinstance(returned, tuple) else returned


def difference(expected: Run, got: Run) -> Comparison:
    """Compare two runs name by name."""
    mismatches: list[str] = []
    errors = {
        kind: relative_errors(kind, getattr(expected, kind), getattr(got, kind), mismatches)
        for kind in ("outputs", "gradients", "parameters")
    }
    return Comparison(**errors, mismatches=tuple(mismatches))


def relative_errors(
    kind: str, expected: Mapping[str, object], got: Mapping[str, object], mismatches: list[str]
) -> dict[str, float]:
    """Relative L2 error of each tensor; what can't be compared goes to `mismatches`."""
    norms = [v.double().norm() for v in expected.values() if isinstance(v, Tensor) and v.is_floating_point()]
    floor = FLOOR * float(torch.stack(norms).norm()) if norms and kind == "gradients" else 0.0
    errors: dict[str, float] = {}
    for name in {**expected, **got}:
        left, right = expected.get(name), got.get(name)
        if isinstance(left, Tensor) and isinstance(right, Tensor):
            if left.shape != right.shape or left.dtype != right.dtype:
                mismatches.append(f"{kind} {name}: {left.dtype} {[*left.shape]} != {right.dtype} {[*right.shape]}")
                continue
            size = max(float(left.double().norm()), floor)
            gap = float((left.double() - right.double()).norm())
            errors[name] = gap / size if size else gap
        elif isinstance(left, Tensor) or isinstance(right, Tensor) or left != right:
            mismatches.append(f"{kind} {name}: eager has {shown(left)}, compiled has {shown(right)}")
    return errors


def shown(value: object) -> str:
    """A value in an error message."""
    return f"a tensor {[*value.shape]}" if isinstance(value, Tensor) else repr(value)
