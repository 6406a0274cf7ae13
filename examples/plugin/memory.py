"""An engine that remembers translations: PyTorch searches each sentence only once."""

from collections.abc import Iterable, Iterator

from nmtkit import extend
from nmtkit.extend import BatchHypotheses, EngineConfig, LoadedModels, SearchOptions, Segment, SegmentBatch


@extend.ENGINES.register("memory", EngineConfig())
class Memory(extend.Engine):
    def __init__(self, config: EngineConfig, loaded: LoadedModels) -> None:
        super().__init__(config, loaded)
        self.torch = extend.TorchEngine(config, loaded)
        self.known: dict[tuple[SearchOptions, tuple[int, ...]], list[extend.Hypothesis]] = {}

    def refusal(self, options: SearchOptions) -> str | None:
        return "--sampling" if options.sampling else None

    def refuses(self, segment: Segment) -> bool:
        return segment.constraints != extend.NO_CONSTRAINTS

    def decode(
        self, batches: Iterable[SegmentBatch], options: SearchOptions, polled: bool = False
    ) -> Iterator[tuple[int, BatchHypotheses]]:
        for number, batch in enumerate(batches):
            keys = [(options, tuple(segment.ids)) for segment in batch]
            new = {key: segment for key, segment in zip(keys, batch, strict=True) if key not in self.known}
            ((_, found),) = self.torch.decode([list(new.values())], options)
            self.known |= zip(new, found, strict=True)
            yield number, [self.known[key] for key in keys]
