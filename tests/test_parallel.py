"""Models that are spread over processes are refused by name, also where there is one process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import longstraw
from longstraw.errors import SeveralProcesses
from tests.small import Tiny, inputs, step


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of this process alone."""
    path = os.fspath(tmp_path_factory.mktemp("group") / "store")
    dist.init_process_group("gloo", store=dist.FileStore(path, 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def replicated() -> nn.Module:
    return nn.parallel.DistributedDataParallel(Tiny())


def sharded() -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = Tiny()
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    for part in (model.up, model):
        fully_shard(part, mesh=mesh)
    return model


def sharded_flat() -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(Tiny(), device_id=torch.device("cpu"))


def cut_by_columns() -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    return parallelize_module(Tiny(), mesh, {"up": ColwiseParallel()})


def compiled(function: Callable[..., Tensor], *args: object) -> Tensor:
    """The step's loss."""
    return torch.compile(function, backend="longstraw")(*args)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("run", [compiled, longstraw.explain, longstraw.verify])
@pytest.mark.parametrize(
    "make, named",
    [
        (replicated, "DistributedDataParallel"),
        (sharded, "FSDPModule"),
        (sharded_flat, "FullyShardedDataParallel"),
        (cut_by_columns, "DTensor"),
    ],
)
def test_a_spread_model_is_refused(make: Callable[[], nn.Module], named: str, run: Callable[..., object]) -> None:
    with pytest.raises(SeveralProcesses, match=named) as error:
        run(step, make(), *inputs())
    assert "reduce the gradients" in str(error.value)


def test_a_spread_model_that_the_step_closes_over_is_refused() -> None:
    model = replicated()
    with pytest.raises(SeveralProcesses, match=r"Pass model\.module"):
        compiled(lambda *args: step(model, *args), *inputs())


@pytest.mark.parametrize("run", [compiled, longstraw.explain, longstraw.verify])
def test_the_module_inside_may_be_used(run: Callable[..., object]) -> None:
    def unwrapped(model: nn.Module, *args: Tensor) -> Tensor:
        return step(model.module, *args)

    run(unwrapped, replicated(), *inputs())
