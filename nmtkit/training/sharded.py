"""Parameters, gradients and optimizer state shared out among the processes: `--parallel fsdp`, by torch's FSDP2.

A layer's parameters are gathered when it is about to compute and given up after it; its gradients are summed, in fp32,
into the share of each process at the end of every backward pass, since to keep them whole until the end of an update
would take the memory that sharing saves. All processes make equally many passes: the feed fills up with idle slices.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from nmtkit import distributed
from nmtkit.packed import Layout, Packed


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The members of the model's lists of modules, outermost lists only, that it calls as `layer(…)`: FSDP gathers
    parameters at such a call and at no other, so the rest is gathered with the whole model."""
    called: set[nn.Module] = set()
    listed = _listed(model)
    handles = [layer.register_forward_hook(lambda layer, *_: called.add(layer)) for layer in listed]
    source, target = (Packed(torch.zeros(1, dtype=torch.int64), Layout.of(torch.ones(1).long())) for _ in range(2))
    with torch.no_grad():
        model.eval()(source, target)
    for handle in handles:
        handle.remove()
    return [layer for layer in listed if layer in called]


def _listed(module: nn.Module) -> list[nn.Module]:
    found: list[nn.Module] = []
    for child in module.children():
        found += list(child) if isinstance(child, nn.ModuleList) else _listed(child)
    return [layer for layer in found if any(True for _ in layer.parameters())]


class Shards:
    """This process's shares of all parameters, in place of `Gradients`; splits `model`, which is then on `device`.

    `gathered_type`: of the gathered parameters where it is not their own; half the bytes to send and to hold.
    """

    def __init__(self, model: nn.Module, device: torch.device, gathered_type: torch.dtype | None = None) -> None:
        self.model = model
        mesh = init_device_mesh(device.type, (distributed.world_size(),))
        types = MixedPrecisionPolicy(param_dtype=gathered_type, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for module in (*layers_of(model), model):
            fully_shard(module, mesh=mesh, mp_policy=types)
        self.modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for module in self.modules:  # sums, not means
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        model.to(device)  # buffers of modules without parameters
        self.trained: dict[str, nn.Parameter] = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
                # optimizers compute on the shares as on any tensors
                share = nn.Parameter(_share(parameter))
                share.grad = _share(parameter.grad)
                self.trained[name] = share
        if not self.trained:
            raise ValueError("no parameter is left to train; freeze fewer of them")
        self.nonfinite = torch.zeros((), device=device)

    def clear(self) -> None:
        torch._foreach_zero_(self._gradients())
        self.nonfinite.zero_()

    def mark_nonfinite(self, value: Tensor) -> None:
        """Makes `norm` what is not finite on every rank, when `value` is; 0 changes nothing."""
        self.nonfinite += value

    def arm(self) -> None:
        """Nothing: every backward pass ends in sums."""

    def reduce(self) -> None:
        """Nothing: the sums are there."""

    def norm(self) -> Tensor:
        """The 2-norm of all gradients of all processes, in fp32; not finite when any gradient is not."""
        squares = torch.stack(torch._foreach_norm(self._gradients())).float().square().sum()
        return distributed.all_reduce(squares + self.nonfinite).sqrt()

    def scale(self, factor: Tensor | float) -> None:
        torch._foreach_mul_(self._gradients(), factor)

    def _gradients(self) -> list[Tensor]:
        return [share.grad for share in self.trained.values() if share.grad is not None]

    # --- whole tensors, for checkpoints and for what calls a model otherwise than as `model(…)` -----------------------

    def whole(self, name: str, share: Tensor) -> Tensor:
        """The tensor of which every process has its share, shared out like parameter `name`: on rank 0, on the CPU.

        All ranks are to call it; the others get an empty one. A tensor of other dimensions is what it was.
        """
        parameter = self.model.get_parameter(name)
        return _gathered(parameter, share) if share.dim() == parameter.dim() else share

    def part(self, name: str, whole: Tensor) -> Tensor:
        """The reverse: this process's share of a tensor that all have."""
        parameter = self.model.get_parameter(name)
        if whole.dim() != parameter.dim():
            return whole
        parts = whole.chunk(distributed.world_size())
        return parts[distributed.rank()] if distributed.rank() < len(parts) else whole[:0]

    def weights(self) -> dict[str, Tensor]:
        """`state_dict` of the whole model, on rank 0; a parameter of two names is one tensor. All are to call it."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        once = {id(parameter): _gathered(parameter, _share(parameter)) for parameter in self.model.parameters()}
        state = self.model.state_dict()
        return {name: once[id(parameters[name])] if name in parameters else state[name] for name in state}

    @torch.no_grad()
    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Takes the weights of a checkpoint of the whole model."""
        for name, value in self.model.state_dict().items():
            if isinstance(value, DTensor):
                _share(value).copy_(self.part(name, weights[name]))
            else:
                value.copy_(weights[name])

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Within it every process has all parameters, and any method of the model works, without gradients."""
        for module in self.modules:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        try:
            yield
        finally:
            for module in self.modules:
                module.set_reshard_after_forward(module is not self.model, recurse=False)
                module.reshard()


def _share(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor._local_tensor


def _gathered(parameter: Tensor, share: Tensor) -> Tensor:
    """The whole of `share` on rank 0, on the CPU; empty elsewhere."""
    assert isinstance(parameter, DTensor)
    shape, stride = parameter.shape, parameter.stride()
    mesh, placements = parameter.device_mesh, parameter.placements
    tensor = DTensor.from_local(share.detach(), mesh, placements, run_check=False, shape=shape, stride=stride)
    whole = tensor.full_tensor()
    return whole.cpu() if distributed.is_rank_zero() else whole.new_empty(0)
