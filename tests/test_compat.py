"""Each private PyTorch API that longstraw uses, behind its function: a release that changes one fails here."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
import torch.fx.experimental._config as fx_config
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from longstraw import compat
from longstraw.errors import CompiledTooOften, ModeActive


def graphs(function: object, *args: object, fullgraph: bool = True) -> list[fx.GraphModule]:
    """Dynamo's graphs of a function compiled for a backend that traces as longstraw does."""
    found: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, inputs: object) -> object:
        found.append(gm)
        return gm.forward

    torch.compile(function, backend=compat.trace_backward_inside(backend), fullgraph=fullgraph)(*args)
    return found


def test_sizes_and_ints_are_symbolic_at_the_first_trace_and_equal_ones_differ() -> None:
    (gm,) = graphs(lambda x, y, n: (x.sum(0) + n, y.sum(0)), torch.ones(4, 3), torch.ones(4, 3), 4)
    sizes = [v for v in compat.fake_inputs(gm) if isinstance(v, torch.SymInt)]
    tensors = [v for v in compat.fake_inputs(gm) if isinstance(v, torch.Tensor)]
    assert len({str(size) for t in tensors for size in t.shape}) == 4
    assert any(compat.hint(size) == 4 for size in sizes)


def test_settings_end_with_the_compilation() -> None:
    names = ("assume_static_by_default", "trace_autograd_ops")
    before = [getattr(torch._dynamo.config, name) for name in names]
    graphs(lambda x: x + 1, torch.ones(3))
    assert [getattr(torch._dynamo.config, name) for name in names] == before
    assert fx_config.use_duck_shape


def test_settings_end_with_a_compilation_that_fails() -> None:
    def fails(gm: fx.GraphModule, inputs: object) -> object:
        raise KeyError("on purpose")

    with pytest.raises(Exception, match="on purpose"):
        torch.compile(lambda x: x + 1, backend=compat.trace_backward_inside(fails))(torch.ones(3))
    assert torch._dynamo.config.assume_static_by_default and fx_config.use_duck_shape


def test_other_backends_trace_as_always() -> None:
    compat.trace_backward_inside(lambda gm, inputs: gm.forward)
    found: list[fx.GraphModule] = []

    def other(gm: fx.GraphModule, inputs: object) -> object:
        found.append(gm)
        return gm.forward

    torch.compile(lambda x: x + 1, backend=other)(torch.ones(4, 3))
    assert not any(isinstance(v, torch.SymInt) for v in compat.fake_inputs(found[0]))


@pytest.mark.parametrize("constants", [False, True])
def test_a_float_is_symbolic_from_its_second_value_on_and_a_constant_on_demand(constants: bool) -> None:
    seen: list[bool] = []

    def backend(gm: fx.GraphModule, inputs: object) -> object:
        seen.append(any(isinstance(v, torch.SymFloat) for v in compat.fake_inputs(gm)))
        if constants:
            compat.retrace_with_constants(gm)
        return gm.forward

    compiled = torch.compile(lambda x, c: x * c, backend=compat.trace_backward_inside(backend))
    for c in (0.5, 0.25, 0.75):
        assert float(compiled(torch.ones(()), c)) == c
    assert seen == ([False, True, False, True, False] if constants else [False, True])


@pytest.mark.parametrize("has_model", [False, True])
def test_a_frame_compiled_too_often_is_refused_if_it_ran_a_model(has_model: bool) -> None:
    def backend(gm: fx.GraphModule, inputs: object) -> object:
        if has_model:
            compat.remember_model()
        return gm.forward

    def function(x: torch.Tensor, key: str) -> torch.Tensor:
        return x + len(key)

    compiled = torch.compile(function, backend=compat.trace_backward_inside(backend))
    with torch._dynamo.config.patch(recompile_limit=1):
        compiled(torch.ones(2), "a")
        with pytest.raises(CompiledTooOften, match="key") if has_model else contextlib.nullcontext():
            compiled(torch.ones(2), "bc")
    compat.frames.frames_with_model.clear()


def test_a_call_under_a_mode_that_sees_operators_is_refused_and_not_remembered() -> None:
    calls: list[int] = []

    def backend(gm: fx.GraphModule, inputs: object) -> object:
        def run(*args: object) -> object:
            calls.append(1)
            return gm(*args)

        return run

    compiled = torch.compile(lambda x: x + 1, backend=compat.trace_backward_inside(backend))
    for warm in (False, True):
        with pytest.raises(ModeActive, match="FlopCounterMode"), FlopCounterMode(display=False):
            compiled(torch.ones(2))
        compiled(torch.ones(2))
        assert len(calls) == 1 + warm
    with FlopCounterMode(display=False):  # other backends keep what Dynamo does
        assert torch.compile(lambda x: x + 2, backend="eager")(torch.ones(())) == 3


def test_what_is_no_model_may_be_called_under_a_mode() -> None:
    """In a compiled function, after its graph: what Dynamo may run as it is."""
    seen: list[str] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    def helper(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def metric(x: torch.Tensor) -> torch.Tensor:
        with Seen():
            return helper(x)

    def run(x: torch.Tensor) -> torch.Tensor:
        return metric(x + 1)

    backend = compat.trace_backward_inside(lambda gm, inputs: gm.forward)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo says that it breaks the graph there
        assert torch.equal(torch.compile(run, backend=backend)(torch.ones(2)), torch.full((2,), 4.0))
    assert seen == ["aten.mul.Tensor"]


def test_a_loop_that_calls_backward_is_one_graph_also_after_a_reset() -> None:
    weight = torch.ones(3, requires_grad=True)

    def loop(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            (x * weight).sum().backward()
        return x

    for _ in range(2):
        torch._dynamo.reset()
        (gm,) = graphs(loop, torch.ones(3))
        assert sum(node.target is torch.autograd.grad for node in gm.graph.nodes) == 2


def test_retrace_as_usual_traces_again_with_numbers() -> None:
    seen: list[bool] = []

    def backend(gm: fx.GraphModule, inputs: object) -> object:
        seen.append(any(isinstance(v, torch.SymInt) for v in compat.fake_inputs(gm)))
        compat.retrace_as_usual(gm)
        return gm.forward

    torch.compile(lambda x: x * x.shape[0], backend=compat.trace_backward_inside(backend))(torch.ones(4))
    assert seen == [True, False]


def test_to_aten_keeps_attention_and_takes_views_as_inputs() -> None:
    position = torch.arange(5)[None]

    def attend(q: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, q, q) + position.sum()

    (gm,) = graphs(attend, torch.ones(1, 2, 5, 4), position)
    module = compat.to_aten(lambda *args: fx.Interpreter(gm).run(*args), compat.fake_inputs(gm))
    targets = [node.target for node in module.graph.nodes]
    assert torch.ops.aten.scaled_dot_product_attention.default in targets


def test_source_name_is_the_users_expression() -> None:
    model = torch.nn.Linear(2, 2)
    (gm,) = graphs(lambda model, x: model(x), model, torch.ones(3, 2))
    names = {compat.source_name(node) for node in gm.graph.nodes if node.op == "placeholder"}
    assert any("model" in name and "weight" in name for name in names)


def test_users_expression_leaves_out_how_modules_keep_their_parts() -> None:
    inner = "L['model'].__dict__['_modules']['base_model'].__dict__['_modules']['model'].layers"
    assert compat.users_expression(inner) == "model.base_model.model.layers"
    assert compat.users_expression("len(G['trainer'].metrics['loss'])") == "len(trainer.metrics['loss'])"


def test_graph_break_names_the_line() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        if y.sum() > 0:
            y = y * 2
        return y

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = graphs(broken, torch.ones(3), fullgraph=False)[0]
    reason = compat.graph_break(first)
    assert reason is not None and "if y.sum() > 0" in reason[1]
    assert compat.graph_break(graphs(lambda x: x + 1, torch.ones(3))[0]) is None


def test_depends_on_data_tells_sizes_that_were_read_from_values() -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        (gm,) = graphs(lambda x: x.nonzero() + 0, torch.ones(3))
    node = next(n for n in gm.graph.nodes if n.target == "nonzero" or "nonzero" in str(n.target))
    size = node.meta["example_value"].shape[0]
    assert compat.depends_on_data(size)
    assert not compat.depends_on_data(3)


def test_lookup_backend_finds_torchs_own() -> None:
    assert callable(compat.lookup_backend("eager"))


def test_autocast_state_restores_what_current_autocast_saw() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        state = compat.current_autocast("cpu")
    with compat.autocast_state(state):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    context = compat.enter_autocast("cpu", True, torch.bfloat16)
    assert torch.is_autocast_enabled("cpu")
    compat.exit_autocast(context)
    assert not torch.is_autocast_enabled("cpu")


def test_emit_artifact_costs_nothing_without_a_listener() -> None:
    compat.emit_artifact("longstraw_test", lambda: pytest.fail("rendered for nobody"))


def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


class Holder:
    def method(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def test_functions_are_traced_as_others_for_our_backends_only() -> None:
    def tripled(x: torch.Tensor) -> torch.Tensor:
        return 3 * x

    def tripled_method(self: Holder, x: torch.Tensor) -> torch.Tensor:
        return 3 * x

    def run(x: torch.Tensor) -> torch.Tensor:
        return doubled(x) + Holder().method(x)

    def plain(gm: torch.fx.GraphModule, example_inputs: object) -> object:
        return gm.forward

    def ours(gm: torch.fx.GraphModule, example_inputs: object) -> object:
        return gm.forward

    method = Holder.method
    substitutions = (
        compat.Substitution(None, "doubled", doubled, tripled),
        compat.Substitution(Holder, "method", method, tripled_method),
    )
    compat.trace_backward_inside(ours, lambda options: substitutions)
    for backend, expected in ((plain, 4.0), (ours, 6.0), (plain, 4.0)):
        torch._dynamo.reset()
        compiled = torch.compile(run, backend=backend)
        assert float(compiled(torch.ones(()))) == expected
        assert float(compiled(torch.ones(()))) == expected, "guards hold after the compilation"
    assert Holder.method is method and float(doubled(torch.ones(()))) == 2.0


def test_views_share_memory_and_copies_do_not() -> None:
    x = torch.ones(4, 3)
    assert compat.memory(x.t()[1:]) == compat.memory(x) != compat.memory(x.clone())


def test_inference_mode_and_data_are_known_in_a_graph() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            y = x * 2
        return x.data + y

    (gm,) = graphs(step, torch.ones(3))
    targets = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    for known in (compat.enter_inference_mode, compat.exit_inference_mode, compat.read_data):
        assert known in targets


def test_associative_scans_combine_along_a_dim() -> None:
    x = torch.arange(1.0, 15.0).reshape(2, 7)

    def combine(left: torch.Tensor, right: torch.Tensor, factor: torch.Tensor) -> list[torch.Tensor]:
        return [(left + right) * factor]

    (found,) = compat.associative_scan(combine, [x], [torch.ones(())], dim=1)
    torch.testing.assert_close(found, x.cumsum(1))


def test_composite_ops_are_written_out_on_demand() -> None:
    (gm,) = graphs(lambda x: torch.linalg.vecdot(x, x), torch.ones(3, 2))
    fakes = compat.fake_inputs(gm)

    def targets(**how: object) -> list[object]:
        module = compat.to_aten(lambda *args: fx.Interpreter(gm).run(*args), fakes, **how)
        return [node.target for node in module.graph.nodes if node.op == "call_function"]

    op = torch.ops.aten.linalg_vecdot.default
    assert compat.is_composite(op) and not compat.is_composite(torch.ops.aten.mul.Tensor)
    assert op in targets() and op not in targets(written_out={op})


def test_sizes_that_are_equal_may_be_kept_equal() -> None:
    calls = []

    def backend(gm: fx.GraphModule, inputs: object) -> object:
        fakes = compat.fake_inputs(gm)
        one, other = (compat.expression(fake.shape[0]) for fake in fakes if isinstance(fake, torch.Tensor))
        values = compat.symbol_values(fakes)
        x, y = (fake for fake in fakes if isinstance(fake, torch.Tensor))
        if values[one] == values[other]:
            compat.keep_equal(fakes, one, other)
        calls.append(compat.expression(x.shape[0]) == compat.expression(y.shape[0]))
        return gm.forward

    compiled = torch.compile(lambda x, y: (x + 1, y + 1), backend=compat.trace_backward_inside(backend))
    for one, other in ((4, 4), (6, 6), (4, 5), (3, 8), (7, 7)):
        compiled(torch.ones(one), torch.ones(other))
    assert calls == [True, False], "a graph for equal sizes, a graph for all"
