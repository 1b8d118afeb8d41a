"""One step, top to bottom: capture, score, objective, replay, unwind, finalise.

`run_step` is what a compiled step calls. Capture and score run in its forward; the objective runs under autograd on
their results; replay, unwind and finalise run in the backward of `_Branch`, the one autograd node between parameters
and results.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from longstraw import compat
from longstraw.errors import (
    BackwardTwice,
    BadInput,
    DoubleBackward,
    MissingExtra,
    ParametersChanged,
    PromptNotFound,
)
from longstraw.runtime import prefix_tree
from longstraw.runtime.layouts import Place
from longstraw.runtime.leaves import Leaves, Where
from longstraw.runtime.numbers import Numbers
from longstraw.runtime.prefix_tree import Node
from longstraw.runtime.spans import Runner
from longstraw.runtime.state import Store
from longstraw.stages import Located, Lowered, Runs, Stateful, TokenInput

_TILE_BYTES = 16 << 20
_SPAN_BYTES = 256 << 20


def run_step(program: Lowered, *inputs: Any) -> Any:
    """Run one step on its inputs; return its outputs, ready for backward.

    Args:
        program: the compiled step.
        inputs: values of the traced graph's placeholders, in order.
    """
    located = program.step.partitioned.step
    names = [node for node in located.module.graph.nodes if node.op == "placeholder"]
    values: dict[fx.Node, Any] = dict(zip(names, inputs, strict=True))
    _check_inputs(located, values)
    light = program.prologue(*inputs)
    values.update(zip(program.light, light, strict=True))
    numbers = Numbers(located.sizes, values)
    results: list[Tensor] = []
    for branch, runs in zip(program.step.branches, program.runs, strict=True):
        run = BranchRun(branch, runs, values, numbers, located)
        results += run.apply()
    return program.step.partitioned.objective(*inputs, *results)


def _check_inputs(located: Located, values: Mapping[fx.Node, Any]) -> None:
    devices: dict[torch.device, str] = {}
    for node, value in values.items():
        if not isinstance(value, Tensor):
            continue
        source = next(i.source for i in located.inputs if i.name == node.name)
        if value.ndim and value.numel() == 0:
            raise BadInput(
                f"{source} is empty: its shape is {tuple(value.shape)}.", remedy="Give it at least one entry."
            )
        if value.ndim:
            devices.setdefault(value.device, source)
    if len(devices) > 1:
        listed = ", ".join(f"{source} on {device}" for device, source in devices.items())
        raise BadInput(
            f"The step's tensors are on different devices: {listed}.",
            remedy="Move the model and its inputs to one device.",
        )


def _memory(value: Any) -> int | None:
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


class BranchRun:
    """One branch in one step: its prefix tree, its state, and the order in which spans run.

    Args:
        branch: the compiled branch.
        runs: what runs its graphs.
        values: every input and light value, by node of the step.
        numbers: this step's sizes.
        step: the step, for its options and the names of its inputs.
    """

    def __init__(
        self, branch: Stateful, runs: Runs, values: Mapping[fx.Node, Any], numbers: Numbers, step: Located
    ) -> None:
        self.branch, self.values, self.numbers, self.options = branch, values, numbers, step.options
        self.sources = step.inputs
        self.sizes = numbers.sizes
        place = functools.lru_cache(maxsize=None)(numbers.place)
        self.runner = Runner(branch, runs, values, num_rows=numbers.rows, place=place, tile_bytes=_TILE_BYTES)
        self.place: Callable[[Any], Place] = place
        self.stop = max(stop for _, stop in self.runner.windows)
        self.first_result = min(start for start, _ in self.runner.windows)
        self.span_tokens = self._choose_span()
        self.differentiable = self._differentiable()
        self.tree = self._build_tree()
        self.device = next(v.device for v in values.values() if isinstance(v, Tensor))
        self.root_store: Store | None = None
        self._advance: Callable[[int], object] = _ignore

    # --- plan -------------------------------------------------------------------------------------------------------

    def _choose_span(self) -> int:
        if self.options.span_tokens != "auto":
            return self.options.span_tokens
        fitting = _SPAN_BYTES // max(1, self.branch.graph_bytes_per_token)
        return max(64, min(1024, 1 << max(0, fitting.bit_length() - 1)))

    def _batch(self, tokens: int) -> int:
        if self.options.replay_rows != "auto":
            return self.options.replay_rows
        # An eighth of a span: replay runs heads besides, and must not need more than a span of the prompt in unwind.
        return max(1, self.span_tokens // (8 * max(1, tokens)))

    def _differentiable(self) -> list[fx.Node]:
        found: dict[fx.Node, None] = {}
        for graph in (self.branch.segment.body, *(head.graph for head in self.branch.segment.heads)):
            for node in (*graph.inputs.parameters, *(t.node for t in graph.inputs.tokens)):
                value = self.values[node]
                if isinstance(value, Tensor) and value.requires_grad:
                    found[node] = None
        return list(found)

    def _build_tree(self) -> Node:
        tree = prefix_tree.build(
            range(self.numbers.rows),
            stop=self.stop,
            common=self._common,
            least=self.options.page_tokens,
            batch=self._batch,
        )
        if self.options.prompt_grad == "none":
            if self.first_result <= 0:
                raise PromptNotFound(
                    'prompt_grad="none" needs to know where the prompt ends, and the step computes results for all '
                    "tokens.",
                    remedy="Cut the logits to the response, e.g. logits[:, P - 1 : -1] or logits_to_keep=R + 1.",
                )
            tree = prefix_tree.split_at(tree, self.first_result)
        return tree

    def _common(self, row: int, rows: Sequence[int]) -> list[int]:
        """Return how many tokens from the beginning each row has in common with one row, in everything it reads."""
        lengths = [self.stop] * len(rows)
        for value, dims in self._compared:
            if len(dims) > 1:
                token_start, per_row = dims[1], value
                same = (
                    (per_row[rows] == per_row[row]).flatten(2).all(-1)
                    if per_row.ndim > 2
                    else per_row[rows] == per_row[row]
                )
                for i, line in enumerate(same):
                    different = (~line).nonzero()
                    if len(different):
                        lengths[i] = min(lengths[i], token_start + int(different[0]))
            else:
                same = (value[rows] == value[row]).flatten(1).all(-1)
                lengths = [n if ok else 0 for n, ok in zip(lengths, same.tolist(), strict=True)]
        if torch.is_grad_enabled():
            # A value given for every row gets a gradient for every row, so rows can't share it.
            own = [self.numbers(t.repeated) for t in self._token_inputs if t.node in self.differentiable]
            lengths = [n if other == row else min([n, *own]) for n, other in zip(lengths, rows, strict=True)]
        return lengths

    @functools.cached_property
    def _token_inputs(self) -> list[TokenInput]:
        graphs = (self.branch.segment.body, *(head.graph for head in self.branch.segment.heads))
        return [t for graph in graphs for t in graph.inputs.tokens]

    @functools.cached_property
    def _compared(self) -> list[tuple[Tensor, tuple[int, ...]]]:
        """Return all that differs between rows, as `[rows, tokens, ...]` with its first token, or `[rows, ...]`."""
        found: list[tuple[Tensor, tuple[int, ...]]] = []
        seen: set[Any] = set()
        layouts = [(t.node, t.layout) for t in self._token_inputs]
        sizes = self.sizes
        for program in self.branch.masks:
            for node in program.inputs:
                if isinstance(node.meta.get("val"), Tensor):
                    located = sizes.locate_shape(sizes.shape(node.meta["val"]))
                    value = self.values[node]
                    if located is not None:
                        layouts.append((node, located))
                    elif value.shape[0] == self.numbers.rows:  # tokens unknown: rows are equal as a whole or not at all
                        found.append((value.reshape(self.numbers.rows, -1), (0,)))
        for node, layout in layouts:
            place = self.place(layout)
            key = (node, place)
            value = self.values[node]
            if key in seen or place.row_dim is None or not isinstance(value, Tensor):
                continue
            seen.add(key)
            parts = place.apart(value.detach(), self.numbers.rows, place.stop - place.start)
            if place.token_dim is None:
                found.append((parts.movedim(place.row_dim, 0).reshape(self.numbers.rows, -1), (0,)))
            else:
                moved = parts.movedim((place.row_dim, place.token_dim), (0, 1))
                found.append((moved, (0, place.start)))
        return found

    def versions(self) -> dict[str, tuple[str, int]]:
        """Return for everything that backward reads again the user's name of it and its version counter."""
        sources = {i.name: i.source for i in self.sources}
        names = {_memory(value): sources[node.name] for node, value in self.values.items() if node.name in sources}
        graphs = (self.branch.segment.body, *(head.graph for head in self.branch.segment.heads))
        read = [
            node
            for graph in graphs
            for node in (*graph.inputs.parameters, *graph.inputs.values, *(t.node for t in graph.inputs.tokens))
        ]
        read += [node for program in self.branch.masks for node in program.inputs]
        # A computed value may be a view of an input, e.g. responses[..., None], and shares its counter then.
        return {
            node.name: (names.get(_memory(value), node.name), value._version)
            for node, value in ((node, self.values[node]) for node in read)
            if isinstance(value, Tensor)
        }

    # --- forward ----------------------------------------------------------------------------------------------------

    def apply(self) -> list[Tensor]:
        """Run capture and score; return the results, connected to autograd when they need a gradient."""
        inputs = [self.values[node] for node in self.differentiable]
        if torch.is_grad_enabled() and inputs:
            return list(_Branch.apply(self, *inputs))  # type: ignore[no-untyped-call]
        with torch.no_grad():
            return self.forward(keep=False)

    def forward(self, *, keep: bool) -> list[Tensor]:
        """Capture and score every row; return the results. `keep` retains the shared prompt's state for backward."""
        results = [self._empty_result(i) for i in range(len(self.branch.segment.results))]
        with self._progress("capture and score"):
            self._forward(self.tree, (), results, keep=keep)
        return results

    @contextlib.contextmanager
    def _progress(self, what: str) -> Iterator[None]:
        """Show a bar over the tokens of all spans, if the user asked for one."""
        if not self.options.progress:
            yield
            return
        try:
            from tqdm import tqdm
        except ImportError as error:
            raise MissingExtra("progress=True needs tqdm.", remedy="pip install 'longstraw[progress]'") from error
        with tqdm(total=self.tree.num_tokens, desc=what, unit="tokens", leave=False) as bar:
            self._advance = bar.update
            try:
                yield
            finally:
                self._advance = _ignore

    def _empty_result(self, index: int) -> Tensor:
        node = self.branch.segment.results[index]
        place = self.runner.result_place(index)
        shape = place.joined(
            torch.empty(
                [self.numbers.rows if s == -1 else place.stop - place.start if s == -2 else s for s in place.shape],
                device="meta",
            )
        ).shape
        return torch.zeros(shape, dtype=node.meta["val"].dtype, device=self.device)

    def _spans(self, node: Node) -> list[tuple[int, int]]:
        return [(lo, min(lo + self.span_tokens, node.stop)) for lo in range(node.start, node.stop, self.span_tokens)]

    def _where(self, node: Node, path: tuple[Store, ...], lo: int, hi: int) -> Where:
        rows = tuple(node.rows[:1]) if node.shared else tuple(node.rows)
        return Where(rows, tuple(node.rows), lo, hi, path)

    def _store(self, node: Node) -> Store:
        """Return room for the state of a node's tokens that later tokens read."""
        spans = self._spans(node)
        kept_spans = spans if node.children else spans[:-1]
        stop = kept_spans[-1][1] if kept_spans else node.start
        return Store(
            self.branch.slots,
            self.runner.kept(tuple(node.rows), kept_spans, stop, self.stop),
            owner=f"rows {node.rows[0]}..{node.rows[-1]}, tokens {node.start}..{node.stop}",
            rows=node.num_rows,
            start=node.start,
            stop=stop,
            device=self.device,
        )

    def _forward(self, node: Node, path: tuple[Store, ...], results: Sequence[Tensor], *, keep: bool) -> None:
        store = self._store(node)
        keep = keep and node is self.tree and node.stop > node.start
        try:
            for lo, hi in self._spans(node):
                where = self._where(node, (*path, store), lo, hi)
                self.runner.check_masks(where.rows, lo, hi, self.stop)
                last = hi == node.stop and not node.children
                self.runner.forward(where, results, keep=None if last else store)
                self._advance((hi - lo) * node.num_rows)
            for child in node.children:
                self._forward(child, (*path, store), results, keep=False)
        except BaseException:
            keep = False
            raise
        finally:
            if keep:
                self.root_store = store
            else:
                store.release()

    # --- backward ---------------------------------------------------------------------------------------------------

    @torch.compiler.disable  # autograd may call this while Dynamo watches for frames to compile
    def backward(self, result_grads: Sequence[Tensor | None], wanted: Sequence[fx.Node]) -> Leaves:
        """Replay and unwind every row; return the accumulated gradients."""
        leaves = Leaves(self.values, wanted, dtype=self.options.grad_dtype, num_rows=self.numbers.rows)
        try:
            with self._progress("replay and unwind"):
                self._backward(self.tree, (), result_grads, leaves)
        finally:
            if self.root_store is not None and not self.root_store.released:
                self.root_store.release()
            self.root_store = None
        return leaves

    def _backward(
        self, node: Node, path: tuple[Store, ...], result_grads: Sequence[Tensor | None], leaves: Leaves
    ) -> None:
        spans = self._spans(node)
        frozen = self.options.prompt_grad == "none" and node.stop <= self.first_result
        store = self.root_store if node is self.tree and self.root_store is not None else None
        if store is None:
            store = self._store(node)
        here = (*path, store)
        try:
            if store is not self.root_store:
                for lo, hi in spans if node.children else spans[:-1]:
                    with torch.no_grad():
                        self.runner.forward(self._where(node, here, lo, hi), None, keep=store)
            if not frozen:
                store.track_gradients(self.options.grad_dtype)
            for child in node.children:
                self._backward(child, here, result_grads, leaves)
            if frozen:
                return
            for lo, hi in reversed(spans):
                last = hi == node.stop and not node.children
                if not last:
                    store.restore(lo)
                grads = None if last else store.gradients(lo, hi)
                self.runner.backward(self._where(node, here, lo, hi), result_grads, leaves, state_grads=grads)
                self._advance((hi - lo) * node.num_rows)
        finally:
            if store is not self.root_store:
                store.release()


def _ignore(_: int) -> None:
    """Progress that nobody watches."""


class _Branch(torch.autograd.Function):
    """The one autograd node between a branch's parameters and its results."""

    @staticmethod
    def forward(ctx: Any, run: BranchRun, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.run = run
        ctx.versions = run.versions()
        ctx.autocast = compat.current_autocast(run.device.type)
        results = run.forward(keep=True)
        ctx.mark_non_differentiable(*(r for r in results if not r.is_floating_point()))
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        run: BranchRun | None = ctx.run
        if torch.is_grad_enabled():
            raise DoubleBackward(
                "A gradient of a gradient was asked for (create_graph=True): replay keeps no graph of the backward.",
                remedy="Use create_graph=False; penalties on gradients need eager.",
            )
        if run is None:
            raise BackwardTwice(
                "Backward ran a second time through a compiled step whose state was released after the first.",
                remedy="Call the step again, or add the losses before calling backward once.",
            )
        now = run.versions()
        changed = [now[key][0] for key, before in ctx.versions.items() if now[key] != before]
        if changed:
            raise ParametersChanged(
                f"{changed[0]} was changed in place between the step's forward and its backward"
                f"{f', and {len(changed) - 1} more tensors' if len(changed) > 1 else ''}.",
                remedy="Run backward before optimizer.step() and before loading or averaging weights.",
            )
        ctx.run = None
        wanted = [node for node, needed in zip(run.differentiable, ctx.needs_input_grad[1:], strict=True) if needed]
        with compat.autocast_state(ctx.autocast):
            leaves = run.backward(grads, wanted)
        return (None, *(leaves.gradient(node) if node in wanted else None for node in run.differentiable))
