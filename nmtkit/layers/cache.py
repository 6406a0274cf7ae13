"""What the steps of a beam search keep of attention, without ever copying it into a new order.

The keys and values of every hypothesis a sentence has had stay where they were appended; a mask says which of them
each hypothesis descends from. All hypotheses of a sentence attend to all of the sentence's entries in one product of
matrices, which costs less than moving the cache at every step would.
"""

import math

import torch
from torch import Tensor

# B sentences, Q hypotheses (rows) of each, N = B x Q rows, H heads, K width of a query or key head, V width of a value
# head, E entries of a sentence: one for each hypothesis and step; M memory tokens

ROOM = 64  # entries below which nothing is pruned; what the first allocation holds


class BeamCache:
    """Keys and values of every layer, for all hypotheses of `sentences` sentences."""

    def __init__(self, sentences: int, beams: int, device: torch.device) -> None:
        self.beams = beams
        self.entries = 0
        self.mask = torch.zeros(sentences, beams, 0, device=device)  # B Q E: 0 for a row's ancestors, else -inf
        self.position = torch.full((sentences,), -1, device=device)  # B: place of the newest token
        self.places = torch.zeros(sentences, 0, dtype=torch.int64, device=device)  # B E: each entry's position
        self.stores: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> keys B H C K, values B H C V; E of C in use
        self.new = 0  # entries of the newest step
        self.prune_at = ROOM

    def advance(self, tokens: Tensor) -> Tensor:
        """Makes room for the entries of one more step, of `tokens` N; each layer then appends its own.

        Returns the tokens [R] to step with: at the very first step the rows of a sentence begin alike, with bos, and
        R is B: one row stands for all, and all share its entry. Otherwise R is N.
        """
        sentences, device = len(self.mask), self.mask.device
        first = tokens.view(sentences, self.beams)
        if self.entries == 0 and bool((first == first[:, :1]).all()):
            tokens = first[:, 0]
            self.new, block = 1, self.mask.new_zeros(sentences, self.beams, 1)
        else:
            self.new = self.beams
            block = torch.full((self.beams, self.beams), -math.inf, device=device).fill_diagonal_(0.0)
            block = block.expand(sentences, -1, -1)
        self.position = self.position + 1
        self.places = torch.cat([self.places, self.position[:, None].expand(-1, self.new)], 1)
        self.mask = torch.cat([self.mask, block], 2)
        self.entries += self.new
        return tokens

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Adds the newest tokens' key R H K and value R H V; returns all of the layer's, B H E K and B H E V.

        R is as `advance` says.
        """
        key = key.unflatten(0, (-1, self.new)).transpose(1, 2)  # B H new K
        value = value.unflatten(0, (-1, self.new)).transpose(1, 2)
        keys, values = self.stores.get(layer) or (_room(key, ROOM), _room(value, ROOM))
        if keys.shape[2] < self.entries:
            keys, values = _grown(keys, 2 * self.entries), _grown(values, 2 * self.entries)
        self.stores[layer] = keys, values
        start = self.entries - self.new
        keys[:, :, start : self.entries] = key
        values[:, :, start : self.entries] = value
        return keys[:, :, : self.entries], values[:, :, : self.entries]

    def visible(self, window: int | None) -> Tensor:
        """What to add to the newest rows' scores: B new E; -inf, too, on what is farther than half of `window`."""
        mask = self.mask[:, : self.new]
        if window is None:
            return mask
        far = self.places < (self.position - window // 2)[:, None]
        return mask.masked_fill(far[:, None], -math.inf)

    def select(self, parents: Tensor) -> None:
        """Row n goes on from what row parents[n] was: N; of the same sentence."""
        self.mask = self.mask.flatten(0, 1)[parents].unflatten(0, (-1, self.beams))
        if self.entries > self.prune_at:
            self.prune()

    def prune(self) -> None:
        """Drops the entries that no living row descends from: of old steps most rows share one ancestor."""
        alive = (self.mask == 0).any(1)  # B E
        most = int(alive.sum(1).max())
        self.prune_at = max(ROOM, 2 * most)
        kept = (~alive).to(torch.uint8).argsort(dim=1, stable=True)[:, :most]  # B most; the dead ones stay masked
        self.mask = self.mask.gather(2, kept[:, None].expand(-1, self.beams, -1))
        self.places = self.places.gather(1, kept)
        for layer, stores in self.stores.items():
            keys, values = (_picked(store, kept, self.prune_at + self.beams) for store in stores)
            self.stores[layer] = keys, values
        self.entries = most

    def keep(self, sentences: Tensor) -> None:
        """Drops all but these sentences (indices, ascending)."""
        self.mask, self.position = self.mask[sentences], self.position[sentences]
        self.places = self.places[sentences]
        self.stores = {
            layer: (keys.index_select(0, sentences), values.index_select(0, sentences))
            for layer, (keys, values) in self.stores.items()
        }

    def restart(self, slots: Tensor) -> None:
        """The sentences in these slots begin afresh."""
        self.mask[slots] = -math.inf
        self.position = self.position.index_fill(0, slots, -1)


def _room(like: Tensor, entries: int) -> Tensor:
    return like.new_zeros(like.shape[0], like.shape[1], entries, like.shape[3])


def _grown(store: Tensor, entries: int) -> Tensor:
    """The same with room for so many entries."""
    grown = _room(store, entries)
    grown[:, :, : store.shape[2]] = store
    return grown


def _picked(store: Tensor, entries: Tensor, room: int) -> Tensor:
    """These entries [B, E] of B H C K, in front of some room."""
    sentences, heads, capacity, width = store.shape
    picked = _room(store, room)
    first = torch.arange(sentences * heads, device=store.device).view(sentences, heads, 1) * capacity
    rows = (first + entries[:, None]).flatten()  # of the keys, end to end: whole rows are copied, which gather does not
    found = store.view(-1, width).index_select(0, rows)
    picked[:, :, : entries.shape[1]] = found.view(sentences, heads, -1, width)
    return picked


def attend_rows(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of the few rows of each sentence to what is kept of it: R H K, B H E K, B H E V -> R H*V.

    `mask`, added to the scores, is B Q E, or B 1 E, or None. Plain batched products: with so few queries the fused
    kernels are slower on a CPU.
    """
    sentences, heads, width = len(keys), keys.shape[1], query.shape[-1]
    query = (query * width**-0.5).unflatten(0, (sentences, -1)).transpose(1, 2)  # B H Q K
    scores = query @ keys.transpose(2, 3)
    if mask is not None:
        scores = scores + mask[:, None]
    attended = scores.softmax(-1).to(values.dtype) @ values  # B H Q V
    return attended.transpose(1, 2).reshape(-1, heads * values.shape[-1])
