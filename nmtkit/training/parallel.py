"""Models whose gradients torch sums over all processes: `--parallel ddp` and `--parallel fsdp`.

With ddp, every process has a replica of the model in DistributedDataParallel. Gradients are summed over the processes
during the backward pass of the last micro-batch of an update. (`replicate` of FSDP2 computes the same sums, but keeps a
second copy of all weights and waits for each sum. On two gloo processes, an update of 256 tokens per process takes 1.5
times as long.)

With fsdp, `fully_shard` of FSDP2 gives every process a shard of each parameter, of its gradient and of its optimizer
state. The parameters of a layer are gathered before the layer computes and freed afterwards. Gradients are summed into
the shards, in fp32, at the end of every backward pass. Keeping whole gradients until the end of an update would need
the memory that sharding saves.

Gradients are summed, never averaged: the trainer divides the loss by the target tokens of the whole update. All
processes must make the same number of passes, so the loader adds dummy micro-batches.
"""

import contextlib
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from nmtkit.data.packed import Batch, Packed
from nmtkit.jobs import distributed
from nmtkit.models.architectures import Architecture
from nmtkit.training.criterions import Criterion, Loss

if TYPE_CHECKING:  # importing torch.distributed.tensor takes a second, and only fsdp needs it
    from torch.distributed.tensor import DTensor


class LossModule(nn.Module):
    """Model and criterion in one module, because DistributedDataParallel needs the forward pass in a single call."""

    def __init__(self, model: Architecture, criterion: Criterion) -> None:
        super().__init__()
        self.model = model
        self.criterion = criterion

    def forward(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        loss: Loss = self.criterion(self.model, batch)
        return loss.sum, loss.counts


def all_reduce_sum(_: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Communication hook of DistributedDataParallel: sums the gradients of all processes.

    Losses are already divided by the target tokens of the whole update. The default hook would also divide the
    gradients by the number of processes.
    """
    distributed.advance()
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


class ReplicatedModel:
    """A complete model in this process. With several processes, each process has a replica.

    `parameters` holds the trained parameters by name, for the optimizer and the running means. Raises ValueError if no
    parameter is trained.
    """

    def __init__(self, model: Architecture, criterion: Criterion, device: torch.device) -> None:
        self.model = model.to(device)
        self.parameters = trainable_parameters(model)
        self.loss: nn.Module = LossModule(model, criterion)
        if distributed.world_size() > 1:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # broadcast_buffers is renamed in torch 2.13
                self.loss = DistributedDataParallel(
                    self.loss,
                    broadcast_buffers=False,
                    init_sync=False,  # not needed, because every process draws the parameters from the same seed
                    gradient_as_bucket_view=True,
                    find_unused_parameters=model.find_unused_parameters,
                )
            self.loss.register_comm_hook(None, all_reduce_sum)

    def gradient_sync(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """The context of a forward and backward pass. `last` is true for the last pass of an update."""
        if isinstance(self.loss, DistributedDataParallel) and not last:
            return self.loss.no_sync()
        return contextlib.nullcontext()

    def zero_grad(self) -> None:
        """Clears the gradients. Gradients of DistributedDataParallel become 0, because they are views of buckets."""
        if isinstance(self.loss, DistributedDataParallel):
            torch._foreach_zero_(self.gradients())
        else:
            for parameter in self.parameters.values():
                parameter.grad = None

    def gradients(self) -> list[Tensor]:
        """Returns the gradients of `parameters`. Unused parameters, for example in dropped layers, have zeros."""
        gradients = []
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        return gradients

    def gradient_norm(self) -> Tensor:
        """Returns the 2-norm of all gradients, in fp32, on the device."""
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(self.gradients())).float())

    # --- the whole model, for checkpoints and searches; a sharded model gathers its shards --------------------------

    def gather(self, name: str, value: Any) -> Any:
        """Returns the whole value on rank 0. Every rank must call this method.

        `value` is the part that this process has of the parameter `name`, or of a value in the optimizer state of this
        parameter.
        """
        return value

    def shard(self, name: str, whole: Any) -> Any:
        """Returns the part of `whole` for this process.

        `whole` is the parameter `name`, or a value in the optimizer state of this parameter.
        """
        return whole

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the `state_dict` of the whole model on rank 0. Every rank must call this method."""
        return self.model.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Loads `state` into the model. `state` has at least all trained parameters."""
        missing, unexpected = self.model.load_state_dict(state, strict=False)
        assert not unexpected and not self.parameters.keys() & set(missing)

    def unsharded(self) -> contextlib.AbstractContextManager[None]:
        """The context in which every process can call all methods of the model, without gradients."""
        return contextlib.nullcontext()


class ShardedModel(ReplicatedModel):
    """A sharded model: this process has a shard of every parameter.

    Parameters are gathered in `gathered_dtype`, if given. With bf16, half as many bytes are sent and stored.
    """

    def __init__(
        self, model: Architecture, criterion: Criterion, device: torch.device, gathered_dtype: torch.dtype | None = None
    ) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        self.model = model
        self.loss = LossModule(model, criterion)
        self.dimensions = {name: each.dim() for name, each in model.named_parameters(remove_duplicate=False)}
        mesh = init_device_mesh(device.type, (distributed.world_size(),))
        policy = MixedPrecisionPolicy(gathered_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for module in (*sharded_layers(model), model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        self.sharded_modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for sharded in self.sharded_modules:
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
        model.to(device)  # also moves buffers of modules without parameters
        self.parameters = {}
        for name, parameter in trainable_parameters(model).items():
            parameter.grad = torch.zeros_like(parameter)
            # Optimizers get the shards as ordinary tensors, not as DTensors.
            self.parameters[name] = nn.Parameter(local_shard(parameter))
            self.parameters[name].grad = local_shard(parameter.grad)

    def zero_grad(self) -> None:
        torch._foreach_zero_(self.gradients())

    def gradient_norm(self) -> Tensor:
        squares = torch.stack(torch._foreach_norm(self.gradients())).float().square().sum()
        return distributed.all_reduce(squares).sqrt()

    def _is_sharded(self, name: str, value: object) -> bool:
        """Returns whether a value is sharded like the parameter `name`.

        Tensors with as many dimensions as the parameter are sharded. Optimizer state can also belong to a part of a
        parameter, as in Muon. Such state has another name and is not sharded.
        """
        return isinstance(value, Tensor) and value.dim() == self.dimensions.get(name)

    def gather(self, name: str, value: Any) -> Any:
        return gather_shards(self.model.get_parameter(name), value) if self._is_sharded(name, value) else value

    def shard(self, name: str, whole: Any) -> Any:
        if not self._is_sharded(name, whole):
            return whole
        shards = whole.chunk(distributed.world_size())
        return shards[distributed.rank()] if distributed.rank() < len(shards) else whole[:0]

    def state_dict(self) -> dict[str, Tensor]:
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        # Tied parameters stay a single tensor.
        gathered = {
            id(parameter): gather_shards(parameter, local_shard(parameter)) for parameter in parameters.values()
        }
        state = self.model.state_dict()
        return {name: gathered[id(parameters[name])] if name in parameters else state[name] for name in state}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        for name, value in self.model.state_dict().items():
            if name not in state:
                assert name not in self.parameters, name
            elif name in parameters:
                local_shard(parameters[name]).copy_(self.shard(name, state[name]))
            else:
                value.copy_(state[name])

    @contextlib.contextmanager
    def unsharded(self) -> Iterator[None]:
        for module in self.sharded_modules:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        try:
            yield
        finally:
            for module in self.sharded_modules:
                module.set_reshard_after_forward(module is not self.sharded_modules[0], recurse=False)
                module.reshard()


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters that are not frozen, by name. Raises ValueError if all are frozen."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not parameters:
        raise ValueError("no parameter is left to train; freeze fewer parameters")
    return parameters


def sharded_layers(model: Architecture) -> list[nn.Module]:
    """Returns the layers that are gathered one at a time: the members of the outermost lists of modules.

    FSDP gathers parameters when a module is called. A forward pass on one token shows which layers the model calls as
    `layer(…)`. All other layers are gathered with the whole model.
    """
    called: set[nn.Module] = set()
    listed = _listed_layers(model)
    handles = [layer.register_forward_hook(lambda layer, *_: called.add(layer)) for layer in listed]
    with torch.no_grad():
        model.eval()(Packed.from_lists([[0]]), Packed.from_lists([[0]]))
    for handle in handles:
        handle.remove()
    return [layer for layer in listed if layer in called]


def _listed_layers(module: nn.Module) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for child in module.children():
        layers += list(child) if isinstance(child, nn.ModuleList) else _listed_layers(child)
    return [layer for layer in dict.fromkeys(layers) if any(True for _ in layer.parameters())]  # tied layers once


def local_shard(tensor: Tensor) -> Tensor:
    """Returns the part of a DTensor that this process has. The part shares memory with the DTensor."""
    return cast("DTensor", tensor)._local_tensor


def gather_shards(parameter: Tensor, shard: Tensor) -> Tensor:
    """Gathers a tensor that is sharded like `parameter`. `shard` is the part of this process.

    Returns the whole tensor, on the CPU, on rank 0, and an empty tensor on the other ranks.
    """
    from torch.distributed.tensor import DTensor

    assert isinstance(parameter, DTensor)
    shape, stride = parameter.shape, parameter.stride()
    mesh, placements = parameter.device_mesh, parameter.placements
    tensor = DTensor.from_local(shard.detach(), mesh, placements, run_check=False, shape=shape, stride=stride)
    whole = tensor.full_tensor()
    return whole.cpu() if distributed.is_rank_zero() else whole.new_empty(0)
