"""One branch of one step: in which order its spans run, what each finds before it and what is kept after it.

Forward captures and scores: depth first over the prefix tree, every node's state on top of its parents'. Backward
replays the responses and unwinds the prompt: the same walk, each node's spans in reverse after its children.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from longstraw import compat
from longstraw.errors import BadInput, PromptNotFound
from longstraw.runtime import needed, prefix_tree
from longstraw.runtime.boundary import States
from longstraw.runtime.layouts import Place
from longstraw.runtime.leaves import Leaves, Where, learning_inputs
from longstraw.runtime.numbers import Numbers
from longstraw.runtime.pages import PagePool
from longstraw.runtime.plan import Plan, Shape
from longstraw.runtime.prefix_tree import Node
from longstraw.runtime.progress import Advance, bar, unseen
from longstraw.runtime.reuse import Prompt, PromptCache, Stale, read_for, weights_for
from longstraw.runtime.row_comparison import RowComparison
from longstraw.runtime.shorter import Result, Shorter
from longstraw.runtime.spans import Runner, SpanGraph
from longstraw.runtime.state import Kept, Store
from longstraw.runtime.tiers import Tier
from longstraw.stages import Located, Runs, Stateful


class BranchRun:
    """One branch in one step: its prefix tree, its state, and the order in which spans run.

    Args:
        branch: the compiled branch.
        runs: what runs its graphs.
        values: every input and light value, by node of the step.
        numbers: this step's sizes.
        step: the step, for its options and the names of its inputs.
        shorten: told of shorter spans for later steps, when memory was too full for these.
        cache: keeps the state of the tokens that all rows share for later steps; None keeps it for this one only.
    """

    def __init__(
        self,
        branch: Stateful,
        runs: Runs,
        values: Mapping[fx.Node, Any],
        numbers: Numbers,
        step: Located,
        *,
        shorten: Callable[[int], None],
        cache: PromptCache | None = None,
    ) -> None:
        self.branch, self.values, self.numbers = branch, values, numbers
        self.options, self.inputs = step.options, step.inputs
        place = functools.lru_cache(maxsize=None)(numbers.place)
        self.runner = Runner(
            branch,
            runs,
            values,
            num_rows=numbers.rows,
            row_tokens=numbers.tokens,
            place=place,
        )
        self.place: Callable[[Any], Place] = place
        self.stop = max(stop for _, stop in self.runner.windows)
        self.first_result = min(start for start, _ in self.runner.windows)
        if self.first_result < 0 or self.stop > numbers.tokens:
            raise BadInput(
                f"The step has results for the tokens {self.first_result} to {self.stop}, and its rows have "
                f"{numbers.tokens} tokens.",
                remedy="Cut off what was padded before the first or after the last token.",
            )
        self.differentiable = learning_inputs(branch, values, step.learns)
        self.learns = any(node in step.learns for node in branch.segment.results)
        self._comparison = RowComparison(
            branch, values, numbers, place, stop=self.stop, differentiable=self.differentiable
        )
        self.device = next(v.device for v in values.values() if isinstance(v, Tensor))
        self.cache = cache
        self._stops = [self.stop] * numbers.rows
        self._read: Sequence[Tensor] | None = None
        self.stale: Stale | None = None
        self.root_store: Store | None = None
        self.leaves: Leaves | None = None
        self._recorded: dict[tuple[int, int], SpanGraph] = {}
        self._recordable = 0
        self._results: list[Tensor] = []
        self._needed: list[int] = []
        self._shorter = Shorter(shorten)
        self._advance: Advance = unseen

    # --- plan -------------------------------------------------------------------------------------------------------

    def leave_out(self, read: Sequence[Tensor]) -> None:
        """Run each row up to the last token that has an entry of a result that is read. Only before `take`.

        Args:
            read: which entries of each result are read.
        """
        self._read = read
        self._stops = needed.ends(read, self._places, self.numbers.rows, self.stop)
        self.stop = max(self._stops)

    def take(self, plan: Plan) -> None:
        """Run by this plan. Before anything has run, and before all that depends on the tree of rows."""
        self.plan = plan
        self.tier = Tier(plan.tier, self.device)
        self.tree = self._build_tree()
        if self.tree.stop == self.tree.start:
            self.cache = None

    @property
    def shape(self) -> Shape:
        """What a plan depends on."""
        kept = self.runner.visibility.kept(tuple(self.tree.rows), self._spans(self.tree), self.tree.stop, self.stop)
        sizes = [slot.bytes_per_token for slot in self.branch.slots]
        whole = sum(sizes) * (self.tree.stop - self.tree.start)
        part = sum(size * k.total for size, k in zip(sizes, kept, strict=True)) / whole if whole else 1.0
        return Shape.of(self.tree, rows=self.numbers.rows, results=(self.first_result, self.stop), kept=part)

    def _build_tree(self) -> Node:
        tree = prefix_tree.build(
            range(self.numbers.rows),
            ends=self._stops,
            common=self._comparison.common,
            least=self.options.page_tokens,
            batch=self.plan.batch,
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

    # --- forward ----------------------------------------------------------------------------------------------------

    def forward(self, *, keep: bool) -> list[Tensor]:
        """Capture and score every row; return the results.

        `keep` retains for backward the shared prompt's state, and the graphs of its last tokens and of as many
        responses as need less than a span together: these need not run again.
        """
        if self.cache is None:
            return self._unless_full(lambda: self._capture_and_score(None, keep=keep))
        prompt = self._prompt()
        captured = self.cache.reuse(prompt)
        if captured is None:
            self._score_from_old(self.cache, prompt)
        results = self._unless_full(lambda: self._capture_and_score(captured, keep=keep))
        assert self.root_store is not None, "the shared tokens' state is held until the cache has it"
        self.cache.keep(self._prompt() if self._shorter.used else prompt, self.root_store)
        if not keep:
            self.root_store = None
        return results

    def _prompt(self) -> Prompt:
        """Return what the state of the tokens that all rows share depends on, beside weights."""
        reads = read_for(self.tree, self.branch, self.values, self.numbers, self.place)
        setting = (self.device, compat.current_autocast(self.device.type))
        weights = weights_for(self.branch, self.values)
        return Prompt(self.tree.stop, tuple(self._kept(self.tree)[0]), setting, weights, reads)

    def _score_from_old(self, cache: PromptCache, prompt: Prompt) -> None:
        """Score every row from the state that is kept of this prompt, if any, and let go of that state."""
        steps = cache.reuses + 1
        captured = cache.take(prompt)
        if captured is not None:
            stale = self.stale = Stale(self.empty_results(), steps, self._read)

            def score() -> None:
                self._forward(self.tree, (), stale.results, keep=False, captured=captured)

            with torch.no_grad():
                self._unless_full(score)
            self.root_store = None

    def _capture_and_score(self, captured: Store | None, *, keep: bool) -> list[Tensor]:
        results = self.empty_results()
        if keep:
            self.leaves = self._new_leaves()
            self._recordable = self.plan.response_tokens
        with self._bar("capture and score") as self._advance:
            self._forward(self.tree, (), results, keep=keep, captured=captured)
        self._results = [result.detach() for result in results] if keep else []
        return results

    def _new_leaves(self) -> Leaves:
        return Leaves(self.values, self.differentiable, dtype=self.options.grad_dtype, num_rows=self.numbers.rows)

    def _unless_full(self, run: Callable[[], Result]) -> Result:
        return self._shorter.once_more_if_full(run, self._halve, lambda: self.plan.describe())

    def _halve(self) -> int:
        """Cut spans in half; return their tokens. A captured prompt stays if it is only read."""
        tokens = max(1, self.plan.span_tokens // 2)
        self._recorded.clear()
        self.leaves = None
        self.take(dataclasses.replace(self.plan, span_tokens=tokens))
        if self.root_store is not None and not self._is_frozen(self.tree.stop):
            self.root_store.release()  # of what shorter spans read, it may not have kept all
            self.root_store = None
        return tokens

    def _bar(self, what: str) -> contextlib.AbstractContextManager[Advance]:
        return bar(what, self.tree.num_tokens, shown=self.options.progress)

    def empty_results(self) -> list[Tensor]:
        """Return zeros for each result, of all rows and of the tokens that have it."""
        return [self.runner.empty_result(i) for i in range(len(self.branch.segment.results))]

    @property
    def _places(self) -> list[Place]:
        return [self.runner.result_place(i) for i in range(len(self.branch.segment.results))]

    def _spans(self, node: Node) -> Sequence[tuple[int, int]]:
        """Return the spans of a node; the last one of a prompt is short enough to keep its graph during replay."""
        return self.plan.spans(node, has_tail=node is self.tree and bool(node.children))

    def _is_frozen(self, until: int) -> bool:
        """Return whether no gradient reaches the tokens before one: they have no results, and their state none."""
        constant = self.options.prompt_grad == "none" or not self.branch.state_learns
        return constant and until <= self.first_result

    def _where(self, node: Node, path: tuple[Store, ...], lo: int, hi: int) -> Where:
        rows = tuple(node.rows[:1]) if node.shared else tuple(node.rows)
        return Where(rows, tuple(node.rows), lo, hi, path)

    def _kept(self, node: Node) -> tuple[list[Kept], int]:
        """Return for each slot which of a node's tokens later tokens read, and where the last captured one ends."""
        spans = self._spans(node)
        kept_spans = spans if node.children else spans[:-1]
        stop = kept_spans[-1][1] if kept_spans else node.start
        return self.runner.visibility.kept(tuple(node.rows), kept_spans, stop, self.stop), stop

    def _store(self, node: Node, path: tuple[Store, ...]) -> Store:
        """Return room for the state of a node's tokens that later tokens read."""
        kept, stop = self._kept(node)
        return Store(
            self.branch.slots,
            kept,
            owner=f"rows {node.rows[0]}..{node.rows[-1]}, tokens {node.start}..{node.stop}",
            rows=node.num_rows,
            start=node.start,
            stop=stop,
            tier=self.tier,
            boundary=path[-1].boundaries.at(node.start) if path else self._first_boundary(),
            path=path,
            pages=path[-1].pages if path else PagePool(self.options.page_tokens),
        )

    def _first_boundary(self) -> list[Tensor]:
        """Return the boundary states before the first token: zeros, for one row."""
        return [torch.zeros((1, *c.shape), dtype=c.dtype, device=self.device) for c in self.branch.carries]

    def _forward(
        self,
        node: Node,
        path: tuple[Store, ...],
        results: Sequence[Tensor],
        *,
        keep: bool,
        captured: Store | None = None,
    ) -> None:
        """Capture a node, unless its state is given, and all below it; write the results."""
        store = self._store(node, path) if captured is None else captured
        here = (*path, store)
        keep_store = (keep or self.cache is not None) and node is self.tree and node.stop > node.start
        keep_starts = keep_store and not self._is_frozen(node.stop)
        spans = self._spans(node)
        every = self.plan.boundary_every(len(spans), node.num_rows) if keep_starts else 0
        try:
            if keep_starts:
                store.track_gradients(self.options.grad_dtype)
            for number, (lo, hi) in enumerate(spans, start=1):
                where = self._where(node, here, lo, hi)
                self.runner.visibility.check(where.rows, lo, hi, self.numbers.tokens)
                after = () if captured is not None else self._run_span(node, where, results, keep=keep)
                if after:
                    store.boundaries.save(hi, after, keep=bool(every) and number % every == 0)
                self._advance((hi - lo) * node.num_rows)
            for child in node.children:
                self._forward(child, here, results, keep=keep and keep_store)
        except BaseException:
            keep_store = False
            raise
        finally:
            if keep_store:
                self.root_store = store
            elif captured is None:
                store.release()
        if not path:
            store.pages.check_released("forward", but=store.owner if keep_store else None)
            store.pages.forget_released()

    def _run_span(self, node: Node, where: Where, results: Sequence[Tensor], *, keep: bool) -> States:
        """Append a span's state to its node's store and write its results; return the boundary states after it."""
        store = None if where.hi == node.stop and not node.children else where.path[-1]
        if keep and self._records(node, where.lo, where.hi):
            return self._record(node, where, results, store=store)
        return self.runner.forward(where, results, keep=store)

    def _records(self, node: Node, lo: int, hi: int) -> bool:
        """Return whether a span's graph is kept from the forward on: backward need not run the span again."""
        if hi < node.stop or self._is_frozen(hi):
            return False
        if node is self.tree:
            return not node.children or hi - lo <= self.plan.tail_tokens
        tokens = (hi - lo) * node.num_rows
        if node.children or lo > node.start or tokens > self._recordable:
            return False
        self._recordable -= tokens
        return True

    def _record(self, node: Node, where: Where, results: Sequence[Tensor], *, store: Store | None) -> States:
        """Run a span with autograd, keep its graph for backward and write its results; return the states after it."""
        assert self.leaves is not None, "graphs are recorded for backward only"
        graph = self.runner.record(where, self.leaves, appends=store is not None)
        if store is not None:
            store.append([value.detach() for value in graph.state])
        if graph.hidden:
            self.runner.write_results(where, [value.detach() for value in graph.hidden], results)
        self._recorded[id(node), where.lo] = graph
        return tuple(value.detach() for value in graph.after)

    # --- backward ---------------------------------------------------------------------------------------------------

    @torch.compiler.disable  # autograd may call this while Dynamo watches for frames to compile
    def backward(self, result_grads: Sequence[Tensor | None]) -> Leaves:
        """Replay and unwind every row; return the accumulated gradients."""
        try:
            with contextlib.nullcontext() if self.cache is None else self.cache.cleared_on_error():
                leaves = self._unless_full(lambda: self._replay_and_unwind(result_grads))
        finally:
            self._recorded.clear()
            self._results.clear()
            self.leaves = None
            root, self.root_store = self.root_store, None
            if root is not None and self.cache is None and not root.released:
                root.release()
        if root is not None:
            root.pages.check_released("backward", but=root.owner if self.cache is not None else None)
            root.pages.forget_released()
        return leaves

    def _replay_and_unwind(self, result_grads: Sequence[Tensor | None]) -> Leaves:
        leaves = self.leaves or self._new_leaves()
        sent = needed.sent(self._results, result_grads)
        self._needed = needed.ends(sent, self._places, self.numbers.rows, self.stop)
        with self._bar("replay and unwind") as self._advance:
            self._backward(self.tree, (), result_grads, leaves)
        return leaves

    def _backward(
        self, node: Node, path: tuple[Store, ...], result_grads: Sequence[Tensor | None], leaves: Leaves
    ) -> None:
        spans, frozen = self._spans(node), self._is_frozen(node.stop)
        store = self.root_store if node is self.tree and self.root_store is not None else None
        captured = store is not None
        if store is None:
            store = self._store(node, path)
        here = (*path, store)
        try:
            if not captured:
                every = self.plan.boundary_every(len(spans), node.num_rows)
                for number, (lo, hi) in enumerate(spans if node.children else spans[:-1], start=1):
                    with torch.no_grad():
                        after = self.runner.forward(self._where(node, here, lo, hi), None, keep=store)
                    if after:
                        store.boundaries.save(hi, after, keep=number % every == 0)
                if not frozen:
                    store.track_gradients(self.options.grad_dtype)
            for child in self._needed_children(node):
                self._backward(child, here, result_grads, leaves)
            for lo, hi in reversed(spans):
                if self._is_frozen(hi):
                    break
                self._unwind(node, self._where(node, here, lo, hi), result_grads, leaves)
                self._advance((hi - lo) * node.num_rows)
        finally:
            if not captured:
                store.release()
        if not path and not captured:
            store.pages.check_released("backward")

    def _needed_children(self, node: Node) -> list[Node]:
        """Return what has to run again below a node: first what kept its graph, then the needed tokens of others."""
        recorded = [child for child in node.children if (id(child), child.start) in self._recorded]
        others = [child for child in node.children if (id(child), child.start) not in self._recorded]
        leaves = [child for child in others if not child.children]
        batch = self.plan.batch if node.num_rows == 1 else None  # rows with states of their own stay together
        cut = needed.shortened(leaves, self._needed, page=self.options.page_tokens, batch=batch)
        self._advance(sum(n.num_tokens for n in leaves) - sum(n.num_tokens for n in cut))
        return [*recorded, *cut, *(child for child in others if child.children)]

    def _unwind(self, node: Node, where: Where, result_grads: Sequence[Tensor | None], leaves: Leaves) -> None:
        """Send gradients through one span, the ones after it being done."""
        store, lo, hi = where.path[-1], where.lo, where.hi
        last = hi == node.stop and not node.children
        graph = self._recorded.pop((id(node), lo), None)
        if graph is None:
            if not last:
                store.restore(lo)
            self._recompute_boundary(node, where.path, lo)
            graph = self.runner.record(where, leaves, appends=not last)
        owner = where.boundary_owner
        grads = self.runner.send(
            graph,
            result_grads,
            leaves,
            state_grads=() if last else store.gradients(lo, hi),
            boundary_grads=() if last else store.boundaries.take_gradients(hi),
        )
        if owner is not None and grads:
            owner.boundaries.add_gradients(lo, grads, self.options.grad_dtype)
        if not last and self.branch.carries:
            store.boundaries.drop(hi)

    def _recompute_boundary(self, node: Node, path: tuple[Store, ...], until: int) -> None:
        """Run the spans before a token of a node again, from the last one whose boundary states are held."""
        store = path[-1]
        at = store.boundaries.nearest(until)
        if not self.branch.carries or at == until:
            return
        cuts = [at, *(lo for lo, _ in self._spans(node) if at < lo < until), until]
        for lo, hi in itertools.pairwise(cuts):
            store.restore(lo)
            with torch.no_grad():
                after = self.runner.forward(self._where(node, path, lo, hi), None, keep=None, boundary=True)
            store.boundaries.save(hi, after, keep=True)
        store.restore(until)
