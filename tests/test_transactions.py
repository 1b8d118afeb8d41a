"""A step is all or nothing: fail at any operator, and everything is as before it, and the next step is right."""

from __future__ import annotations

import contextlib
import gc
import logging
import signal
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from longstraw import backend
from longstraw.errors import OutOfMemory
from longstraw.runtime import transaction
from tests.models import zoo
from tests.small import Tiny, inputs, step
from tests.steps import STEPS

OPTIONS: dict[str, Any] = {"span_tokens": 4, "page_tokens": 2, "replay_rows": 1}


class Terminated(BaseException):
    """What the handler of a signal raises."""


@pytest.fixture
def terminated() -> Iterator[type[BaseException]]:
    """The error of a real signal: the interpreter calls its handler between two instructions."""

    def handler(number: int, frame: Any) -> None:
        raise Terminated("on purpose")

    before = signal.signal(signal.SIGTERM, handler)
    yield Terminated
    signal.signal(signal.SIGTERM, before)


class Interrupting(TorchDispatchMode):
    """Raises at one operator, and at as many after it as it is told to."""

    def __init__(self, at: int | None, error: type[BaseException], *, times: int = 1) -> None:
        super().__init__()
        self.at, self.error, self.times, self.count = at, error, times, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.at is not None and self.at <= self.count < self.at + self.times:
            if self.error is Terminated:
                signal.raise_signal(signal.SIGTERM)
            raise self.error("on purpose")
        return func(*args, **(kwargs or {}))


class Watch:
    """Every store that was made, without keeping it alive."""

    def __init__(self) -> None:
        self.stores: list[weakref.ref[transaction.Store]] = []

    def alive(self) -> int:
        found = [store() for store in self.stores]
        return sum(store is not None and not store.released for store in found)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    found = Watch()
    make = transaction.Store

    def watched(*args: Any, **kwargs: Any) -> transaction.Store:
        store = make(*args, **kwargs)
        found.stores.append(weakref.ref(store))
        return store

    monkeypatch.setattr(transaction, "Store", watched)
    yield found
    assert not found.alive()


class Gate:
    """Runs the forward of every step, the part of it that runs spans, or the backward, under a mode."""

    mode: TorchDispatchMode | None = None
    phase = "forward"

    def around(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def gated(*args: Any, **kwargs: Any) -> Any:
            with self.mode if self.mode is not None and phase == self.phase else contextlib.nullcontext():
                return function(*args, **kwargs)

        return gated


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    found = Gate()
    torch._dynamo.reset()  # compiled steps hold `run_step`
    monkeypatch.setattr(backend, "run_step", found.around("forward", backend.run_step))
    for phase, name in (("spans", "forward"), ("backward", "backward")):
        function = getattr(transaction.BranchRun, name)
        monkeypatch.setattr(transaction.BranchRun, name, found.around(phase, function))
    return found


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("attempts", [15, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("tier", ["device", "files"])
def test_a_step_that_fails_at_any_operator_changes_nothing(
    watch: Watch, gate: Gate, terminated: type[BaseException], tmp_path: Path, phase: str, attempts: int, tier: str
) -> None:
    model = Tiny()
    options = {**OPTIONS, "state_tier": "device" if tier == "device" else str(tmp_path)}
    compiled = torch.compile(step, backend="longstraw", options=options)
    gate.phase = phase

    def run(at: int | None, error: type[BaseException] = RuntimeError) -> int:
        gate.mode = mode = Interrupting(at, error)
        compiled(model, *inputs(prompt=11, response=6)).backward()
        return mode.count

    count = run(None)
    assert count > 100
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    parameters = [p.detach().clone() for p in model.parameters()]
    held = [p.grad for p in model.parameters()]
    random = torch.get_rng_state()
    errors = (RuntimeError, KeyboardInterrupt, MemoryError, terminated)
    for number, at in enumerate(range(1, count + 1, max(1, count // attempts))):
        error = errors[number % len(errors)]
        with pytest.raises(error, match="on purpose"):
            run(at, error)
        assert not watch.alive()
        assert not list(tmp_path.iterdir())
        assert all(p.grad is g for p, g in zip(model.parameters(), held, strict=True))
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), parameters, strict=True))
        assert torch.equal(torch.get_rng_state(), random)
        found = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(torch.equal(p, q) for p, q in zip(found, gradients, strict=True))
    model.zero_grad()
    run(None)
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(p, q) for p, q in zip(found, gradients, strict=True))


@pytest.mark.parametrize("outcome", ["dropped", "backward", "failed"])
def test_state_is_freed_without_the_garbage_collector(watch: Watch, outcome: str) -> None:
    model = Tiny()
    compiled = torch.compile(step, backend="longstraw", options=OPTIONS)
    compiled(model, *inputs(prompt=11)).backward()
    gc.collect()
    gc.disable()
    try:
        watch.stores.clear()
        loss: Tensor | None = compiled(model, *inputs(prompt=11))
        assert watch.alive()
        if outcome == "backward":
            loss.backward()
        elif outcome == "failed":
            with pytest.raises(RuntimeError, match="on purpose"), Interrupting(50, RuntimeError):
                loss.backward()
        if outcome != "dropped":
            assert not watch.alive()
        loss = None
        assert all(store() is None for store in watch.stores)
    finally:
        gc.enable()


# --- out of memory ----------------------------------------------------------------------------------------------------


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """What is logged as a warning."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("longstraw").addHandler(handler)
    yield found
    logging.getLogger("longstraw").removeHandler(handler)


def _tiny(group: int) -> tuple[Any, nn.Module, tuple[Any, ...]]:
    return step, Tiny(), inputs(prompt=27, response=6, group=group)


def _of_zoo(name: str, group: int = 3, **sizes: Any) -> tuple[Any, nn.Module, dict[str, Any]]:
    model = zoo.build(name, **sizes)
    return STEPS["grpo"].function, model, STEPS["grpo"].inputs(model, prompt=27, response=6, group=group)


@pytest.mark.parametrize("phase", ["spans", "backward"])
@pytest.mark.parametrize(
    "case",
    [
        lambda: _tiny(3),
        lambda: _tiny(1),
        pytest.param(lambda: _of_zoo("mamba2", layers=1), marks=pytest.mark.slow),
        pytest.param(lambda: _of_zoo("gemma3_text"), marks=pytest.mark.slow),
        pytest.param(lambda: _of_zoo("qwen3_5_text", layers=2, group=1), marks=pytest.mark.slow),
    ],
    ids=["several rows", "one row", "recurrent", "windows", "recurrent, one row"],
)
def test_a_step_out_of_memory_goes_on_with_half_the_span(
    gate: Gate, watch: Watch, warnings: list[str], phase: str, case: Callable[[], Any]
) -> None:
    run, model, given = case()

    def call(function: Any) -> Tensor:
        return function(model, **given) if isinstance(given, dict) else function(model, *given)

    call(run).backward()
    expected = [p.grad for p in model.parameters()]
    gate.phase = phase
    for attempt in range(4):
        torch._dynamo.reset()
        compiled = torch.compile(run, backend="longstraw", options={**OPTIONS, "span_tokens": 7})
        gate.mode = count = Interrupting(None, RuntimeError)
        model.zero_grad()
        call(compiled).backward()
        gate.mode = Interrupting((1 + attempt) * count.count // 5, torch.OutOfMemoryError)
        model.zero_grad()
        call(compiled).backward()
        assert warnings == ["out of memory (on purpose): spans of 3 tokens from here on"]
        assert not watch.alive()
        for found, wanted in zip((p.grad for p in model.parameters()), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
        gate.mode = Interrupting(None, RuntimeError)
        call(compiled).backward()
        assert len(warnings) == 1, "later steps keep the shorter spans"
        warnings.clear()


@pytest.mark.parametrize("phase", ["spans", "backward"])
def test_a_step_out_of_memory_twice_is_refused_with_its_plan(gate: Gate, watch: Watch, phase: str) -> None:
    model = Tiny()
    compiled = torch.compile(step, backend="longstraw", options={**OPTIONS, "span_tokens": 8})
    gate.phase, gate.mode = phase, Interrupting(400, torch.OutOfMemoryError, times=1 << 30)
    with pytest.raises(OutOfMemory, match="full, also with spans of 4 tokens"):
        compiled(model, *inputs(prompt=11, response=6)).backward()
    assert not watch.alive()
    assert all(p.grad is None for p in model.parameters())
    gate.mode = Interrupting(None, RuntimeError)
    compiled(model, *inputs(prompt=11, response=6)).backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("at", [1, 10, 40])
def test_memory_that_is_full_before_the_first_span_is_said(gate: Gate, watch: Watch, at: int) -> None:
    model, given = Tiny(), inputs(prompt=11, response=6)
    compiled = torch.compile(step, backend="longstraw", options=OPTIONS)
    compiled(model, *given)
    gate.phase, gate.mode = "forward", Interrupting(at, torch.OutOfMemoryError)
    with pytest.raises(OutOfMemory, match="full before the first span"):
        compiled(model, *given)
    assert not watch.alive()
    gate.mode = Interrupting(None, RuntimeError)
    compiled(model, *given).backward()
    assert all(p.grad is not None for p in model.parameters())


# --- soak -------------------------------------------------------------------------------------------------------------


def bytes_of_tensors() -> int:
    """Bytes of all tensors that Python knows of; memory that several share counts once."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter)]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


@pytest.mark.parametrize("steps", [12, pytest.param(500, marks=pytest.mark.slow)])
@torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True)
def test_many_steps_of_random_sizes_failures_and_drops_leave_nothing(
    watch: Watch, gate: Gate, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, steps: int
) -> None:
    """Losses equal eager's at every third step; bytes of tensors are at the end what they were after ten steps."""
    generator = torch.Generator().manual_seed(0)

    def pick(*values: Any) -> Any:
        return values[int(torch.randint(len(values), (), generator=generator))]

    def size(most: int) -> int:
        return int(torch.randint(1, most + 1, (), generator=generator))

    def run(phase: str, function: Callable[..., Any], *args: Any, fails: bool) -> Any:
        """Run a phase, at times out of memory at one operator, or failing at one of the first."""
        if not fails:
            gate.phase = {"forward": "spans"}.get(phase, phase)
            gate.mode = Interrupting(size(200), torch.OutOfMemoryError) if size(10) == 1 else None
            return function(*args)
        gate.phase, gate.mode = phase, Interrupting(size(40), RuntimeError)
        with pytest.raises(RuntimeError, match="on purpose"):
            function(*args)
        return None

    model = Tiny()
    kinds = [
        (torch.compile(step, backend="longstraw", options={**OPTIONS, **options}), options)
        for options in (
            {},
            {"state_tier": str(tmp_path)},
            {"span_tokens": 7, "replay_rows": 3},
            {"state_tier": "host"},
            {"span_tokens": "auto", "replay_rows": "auto", "memory_budget": "1MiB"},
            {"prompt_grad": "none", "reuse_prompt_for": 3},
        )
    ]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)  # the loss has no minimum: slowly
    reused: list[weakref.ref[transaction.Store]] = []
    for number in range(steps):
        run_one, options = pick(*kinds)
        reuses = "reuse_prompt_for" in options
        # Prompts of one length are equal here.
        given = inputs(prompt=pick(9, 20) if reuses else 4 + size(30), response=1 + size(9), group=1 + size(4))
        outcome = pick("step", "step", "drop", "fail forward", "fail backward")
        optimizer.zero_grad()
        loss = run("forward", run_one, model, *given, fails=outcome == "fail forward")
        if loss is not None and number % 3 == 0:
            tolerance = 1e-3 if reuses else 1e-10  # the prompt's state may be that of weights three steps old
            torch.testing.assert_close(loss, step(model, *given), rtol=tolerance, atol=1e-12)
        if outcome in ("step", "fail backward"):
            run("backward", loss.backward, fails=outcome == "fail backward")
        if outcome == "step":
            optimizer.step()
        del loss
        assert watch.alive() <= reuses
        assert not list(tmp_path.iterdir())
        reused += watch.stores if reuses else []
        watch.stores.clear()
        if number == 10:
            optimizer.zero_grad()
            before = bytes_of_tensors()
    optimizer.zero_grad()
    assert abs(bytes_of_tensors() - before) < 1 << 16
    torch._dynamo.reset()
    del run_one, kinds
    gc.collect()
    assert all(store() is None for store in reused), "a prompt is kept as long as the compiled step"
