"""Steps that run again and again on the same tensors, recorded once for each shape."""

from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

import torch

Shape = TypeVar("Shape", bound=Hashable)
Work = Callable[[], None]


class Recorder(Protocol):
    def warm_up(self, work: Work) -> None:
        """Does the work, so that whatever is set up at its first run is not recorded."""

    def record(self, work: Work) -> Work:
        """Gives what does the work, without doing it now."""


class Plain:
    """Records nothing: on a CPU, and wherever a graph is to be compared with no graph."""

    def warm_up(self, work: Work) -> None:
        work()

    def record(self, work: Work) -> Work:
        return work


class CudaGraphRunner:
    """CUDA graphs, replayed one after the other on the current stream; they share one pool of memory.

    Sharing is safe since no result of one stays in the pool for another: steps leave theirs in tensors made before.
    """

    def __init__(self, device: torch.device) -> None:
        with torch.cuda.device(device):
            self.pool = torch.cuda.graph_pool_handle()
            self.stream = torch.cuda.Stream()

    def warm_up(self, work: Work) -> None:
        """On another stream, as recording is: libraries keep workspaces for each."""
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            work()
        current.wait_stream(self.stream)

    def record(self, work: Work) -> Work:
        graph = torch.cuda.CUDAGraph()
        # other threads, such as one that reads the input, may use the device meanwhile
        with torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode="thread_local"):
            work()
        return graph.replay


class Steps(Generic[Shape]):
    """Runs `step(shape)`: the first of a shape as it is, which warms up for the second, which is recorded."""

    def __init__(self, step: Callable[[Shape], None], recorder: Recorder) -> None:
        self.step, self.recorder = step, recorder
        self.recorded: dict[Shape, Work | None] = {}  # None: warm

    def __call__(self, shape: Shape) -> None:
        if shape not in self.recorded:
            self.recorder.warm_up(lambda: self.step(shape))
            self.recorded[shape] = None
            return
        replay = self.recorded[shape]
        if replay is None:
            replay = self.recorded[shape] = self.recorder.record(lambda: self.step(shape))
        replay()
