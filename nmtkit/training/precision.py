"""The dtype of matrix products, and the loss scale that keeps fp16 gradients in range."""

import contextlib
import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor

from nmtkit.models.layers import multiplies_in_bf16

log = logging.getLogger("nmtkit")
_warn_once = cache(log.warning)  # shows a warning only once, although a run resolves its precision twice

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def resolve(precision: str, device: torch.device) -> str:
    """Returns `precision`. Replaces `auto` by bf16 if the device multiplies in bf16, else by fp32.

    Logs a warning for bf16 on a processor without bf16 products. Raises ValueError for a precision that the device does
    not support.
    """
    if device.type == "mps":
        if precision not in ("auto", "fp32"):
            raise ValueError(f"--device mps computes in fp32; leave out --precision {precision}")
        return "fp32"
    if precision == "auto":
        if device.type == "cuda" and not torch.cuda.is_available():
            return "bf16"  # used for an estimate on a machine without a GPU
        has_bf16 = torch.cuda.is_bf16_supported(False) if device.type == "cuda" else multiplies_in_bf16()
        return "bf16" if has_bf16 else "fp32"
    if precision == "fp16" and device.type == "cpu":
        raise ValueError("--precision fp16 is for GPUs; on the CPU give bf16 or fp32")
    if precision == "bf16" and device.type == "cpu" and not multiplies_in_bf16():
        # With AVX2, both passes of a layer with 128 inputs and 512 outputs take 10.5 times as long in bf16 as in fp32.
        _warn_once("this processor has no instructions for bf16, so training takes several times as long as in fp32")
    return precision


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The context of the forward pass of a model. The parameters stay in fp32."""
    return torch.autocast(device.type, DTYPES[precision]) if precision != "fp32" else contextlib.nullcontext()


class LossScale:
    """A factor on the loss in fp16. It is halved if gradients overflow, and doubled after a time without overflow.

    In other precisions the factor is 1. The factor stays on the device, so that the host does not wait for the device.
    torch.amp.GradScaler is not used for three reasons. It needs an additional pass over the gradients to find
    overflows, although the gradient norm shows them. With FSDP, it checks only the shards of this process. It skips
    non-finite updates only in fp16.
    """

    def __init__(self, precision: str, device: torch.device, growth_interval: int = 2000) -> None:
        self.active = precision == "fp16"
        self.growth_interval = growth_interval  # number of finite updates after which the scale doubles
        self.value = torch.tensor(2.0**15 if self.active else 1.0, device=device)
        self.finite_updates = torch.tensor(0, dtype=torch.int32, device=device)

    def update(self, finite: Tensor) -> None:
        """Adjusts the factor. `finite` is a bool on the device: whether all gradients of the update are finite."""
        if self.active:
            found_inf = (~finite).float()
            torch._amp_update_scale_(self.value, self.finite_updates, found_inf, 2.0, 0.5, self.growth_interval)

    def state_dict(self) -> dict[str, float]:
        return {"value": float(self.value), "finite_updates": int(self.finite_updates)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value.fill_(state["value"])
        self.finite_updates.fill_(int(state["finite_updates"]))
