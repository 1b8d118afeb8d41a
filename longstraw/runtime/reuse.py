"""A captured prompt that later steps read again, and how far its state has drifted from what they would capture.

Each branch of a compiled step has one `PromptCache`. It owns the state of the run of tokens that all rows share, with
everything but weights that was read to compute it (`Prompt`). A step whose prompt is equal in all of that reads the
kept state, which weights of an earlier step computed. When its steps are over, the old state scores the responses once
more before the prompt is captured anew: the two sets of results give the `Drift`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from longstraw import compat
from longstraw.options import Drift, Options
from longstraw.runtime.layouts import Place, take
from longstraw.runtime.numbers import Numbers
from longstraw.runtime.prefix_tree import Node
from longstraw.runtime.state import Kept, Store
from longstraw.runtime.versions import inputs_of
from longstraw.stages import Stateful

LARGE_DRIFT = 0.1
"""From which mean absolute difference of log-probabilities on a drift is a warning: there ratios of probabilities are
off by 10 %, half of what the usual clip range allows. The loss is no measure, for that of GRPO is often near zero."""

_LOGGER = logging.getLogger("longstraw")


@dataclass(frozen=True)
class Prompt:
    """What a captured prompt depends on beside weights.

    Attributes:
        stop: end of its tokens; the first is 0.
        kept: for each slot, which of them are kept.
        setting: device and autocast.
        weights: the parameters that its state was computed with, whatever their values are by now.
        reads: tensors and numbers that the model reads for its tokens: ids, positions, masks, other values.
    """

    stop: int
    kept: tuple[Kept, ...]
    setting: tuple[Any, ...]
    weights: tuple[weakref.ref[Tensor], ...]
    reads: tuple[Any, ...]

    def equals(self, other: Prompt) -> bool:
        """Return whether both have the same state while the weights have the same values."""
        described = [(p.stop, p.kept, p.setting, len(p.weights), len(p.reads)) for p in (self, other)]
        if described[0] != described[1]:
            return False
        weights = zip(self.weights, other.weights, strict=True)
        reads = zip(self.reads, other.reads, strict=True)
        return all(one() is two() is not None for one, two in weights) and all(_same(*pair) for pair in reads)

    def copied(self) -> Prompt:
        """Return the same in memory of its own."""
        reads = tuple(value.clone() if isinstance(value, Tensor) else value for value in self.reads)
        return dataclasses.replace(self, reads=reads)


def _same(one: Any, other: Any) -> bool:
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return type(one) is type(other) and bool(one == other)
    described = [(t.dtype, t.shape, t.device) for t in (one, other)]
    return described[0] == described[1] and torch.equal(one, other)


def read_for(
    root: Node, branch: Stateful, values: Mapping[fx.Node, Any], numbers: Numbers, place: Callable[[Any], Place]
) -> tuple[Any, ...]:
    """Return all but weights that the model reads for the tokens of a node whose rows are equal there.

    Args:
        root: the node; it starts at token 0.
        branch: the compiled branch.
        values: every input and light value, by node of the step.
        numbers: this step's sizes.
        place: `layout -> Place` with them.
    """
    body = branch.segment.body.inputs
    found = [_of_tokens(values[t.node], place(t.layout), numbers.rows, root) for t in body.tokens]
    for node in (node for program in branch.masks for node in program.inputs):
        traced = node.meta["val"]
        located = numbers.sizes.locate_shape(numbers.sizes.shape(traced)) if isinstance(traced, Tensor) else None
        whole = located is None
        found.append(values[node] if whole else _of_tokens(values[node], place(located), numbers.rows, root))
    found += [values[node] for node in body.values if not _is_weight(node, values)]
    return tuple(value.detach() if isinstance(value, Tensor) else value for value in found)


def _of_tokens(value: Tensor, place: Place, num_rows: int, root: Node) -> Tensor:
    """Return what a value, in its own layout, has for the tokens of a node and one of its rows."""
    covers = (place.start, place.stop)
    lo = min(max(root.start, place.start), place.stop)
    hi = max(lo, min(root.stop, place.stop))
    return take(value, place, num_rows=num_rows, rows=root.rows[:1], covers=covers, lo=lo, hi=hi)


def weights_for(branch: Stateful, values: Mapping[fx.Node, Any]) -> tuple[weakref.ref[Tensor], ...]:
    """Return the parameters that a branch reads or that what it reads is computed from, trained or not."""
    body = branch.segment.body.inputs
    read = [given for node in body.values if _is_weight(node, values) for given in inputs_of(node)]
    return tuple(weakref.ref(values[node]) for node in (*body.parameters, *read))


def _is_weight(node: fx.Node, values: Mapping[fx.Node, Any]) -> bool:
    """Return whether a value is a parameter, or computed from parameters alone."""
    given = inputs_of(node)
    return bool(given) and all(isinstance(values[one], nn.Parameter) for one in given)


class PromptCache:
    """The captured prompt of one branch of one compiled step, kept between its calls.

    The kept state stays allocated between steps, where `state_tier` says, until a step captures another prompt, fails,
    or Dynamo is reset. It is freed with the last reference, not released: the backward of an
    earlier step may still be going to read what the cache has let go of.

    Args:
        most: how many steps may read one capture again.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._prompt: Prompt | None = None
        self._store: Store | None = None
        self.reuses = 0

    def reuse(self, prompt: Prompt) -> Store | None:
        """Return the state of an equal prompt, which counts as a step, or None when it must be captured."""
        if not self._holds(prompt) or self.reuses == self._most:
            return None
        self.reuses += 1
        _LOGGER.info(
            "prompt of %d tokens reused, not captured anew: step %d of %d since its capture",
            prompt.stop,
            self.reuses,
            self._most,
        )
        return self._store

    def take(self, prompt: Prompt) -> Store | None:
        """Let go of what is kept; return it if it is the state of an equal prompt."""
        store = self._store if self._holds(prompt) else None
        self.clear()
        return store

    def keep(self, prompt: Prompt, store: Store) -> None:
        """Own the state of a prompt from here on."""
        if store is not self._store:
            self._prompt, self._store, self.reuses = prompt.copied(), store, 0

    def clear(self) -> None:
        """Let go of what is kept."""
        self._prompt, self._store, self.reuses = None, None, 0

    @contextlib.contextmanager
    def cleared_on_error(self) -> Iterator[None]:
        """Keep nothing of a step that fails."""
        try:
            yield
        except BaseException:
            self.clear()
            raise

    def _holds(self, prompt: Prompt) -> bool:
        return self._prompt is not None and self._prompt.equals(prompt)


# --- drift ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stale:
    """Results of a branch that were computed from the state it is about to replace.

    Attributes:
        steps: since that state was captured.
        read: which entries of each result the loss reads; None for all.
    """

    results: list[Tensor]
    steps: int
    read: Sequence[Tensor] | None = None


def outputs_and_drift(
    objective: Callable[..., Any], results: Sequence[list[Tensor]], stale: Sequence[Stale | None], options: Options
) -> Any:
    """Return the outputs of a step, and report the drift if any branch has results from a state that it replaced.

    Args:
        objective: `(*results of every branch) -> outputs`.
        results: of each branch.
        stale: for each branch the same from its old state, or None where it captured nothing anew.
        options: whom to tell.
    """
    pairs = [(old, new) for old, new in zip(stale, results, strict=True) if old is not None]
    if not pairs:
        return objective(*(value for branch in results for value in branch))
    mixed = [new if old is None else old.results for old, new in zip(stale, results, strict=True)]
    with torch.no_grad(), _same_random_numbers(pairs[0][1][0].device):
        old_loss = _loss(objective(*(value.detach() for branch in mixed for value in branch)))
    outputs = objective(*(value for branch in results for value in branch))
    with torch.no_grad():
        found = Drift(
            steps=max(old.steps for old, _ in pairs),
            loss=_relative_difference(old_loss, _loss(outputs)),
            log_prob=max(_mean_difference(old, new) for old, new in pairs),
        )
    _report(found, options)
    return outputs


def _same_random_numbers(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Put the random state back afterwards: the step draws what it would have drawn."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def _loss(outputs: Any) -> float | None:
    """Return the first floating scalar among a step's outputs."""
    for value in compat.tree_leaves(outputs):
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 0:
            return float(value)
    return None


def _relative_difference(old: float | None, new: float | None) -> float | None:
    if old is None or new is None:
        return None
    return 0.0 if old == new else abs(old - new) / max(abs(new), torch.finfo(torch.float32).tiny)


def _mean_difference(old: Stale, new: Sequence[Tensor]) -> float:
    """Return the mean absolute difference of all floating numbers that are read; equal infinities count as zero."""
    parts = [
        torch.where(one == other, 0.0, one.double() - other.double()).abs()[... if old.read is None else old.read[i]]
        for i, (one, other) in enumerate(zip(old.results, new, strict=True))
        if one.is_floating_point()
    ]
    total = sum(part.numel() for part in parts)
    return float(torch.cat([part.flatten() for part in parts]).mean()) if total else 0.0


def _report(found: Drift, options: Options) -> None:
    large = not found.log_prob <= LARGE_DRIFT
    _LOGGER.log(logging.WARNING if large else logging.INFO, "%s", found)
    if options.on_drift is not None:
        options.on_drift(found)
