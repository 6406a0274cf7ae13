"""What the steps of a beam search keep of attention, without copying it into a new order at every step.

The keys and values of every hypothesis a sentence has had stay where they were appended; a mask says which of them
each hypothesis descends from. All hypotheses of a sentence attend to all of the sentence's entries in one product of
matrices, which costs less than moving the cache at every step would.

Entries come in sixteens: a softmax over fewer leaves the vector units, and takes ten times as long over 15 as over 16.
A store is exactly as large as what is attended to: torch would copy a part of a larger one at every bf16 product.
"""

import math

import torch
from torch import Tensor

# B sentences, Q hypotheses (rows) of each, N = B x Q rows, H heads, K width of a query or key head, V width of a value
# head, E entries of a sentence, of which there is one for each hypothesis and step; M memory tokens

MULTIPLE = 16


def rounded(entries: int) -> int:
    return -(-entries // MULTIPLE) * MULTIPLE


class KVCache:
    """Keys and values of every layer, of type `dtype`, for all hypotheses of `sentences` sentences."""

    def __init__(self, sentences: int, beams: int, device: torch.device, dtype: torch.dtype) -> None:
        self.beams = beams
        self.used = 0  # entries, of E
        room = rounded(4 * beams)
        # B Q E: 0 for a row's ancestors, else -inf
        self.mask = torch.full((sentences, beams, room), -math.inf, device=device, dtype=dtype)
        self.position = torch.full((sentences,), -1, device=device)  # B: place of the newest token
        self.places = torch.zeros(sentences, room, dtype=torch.int64, device=device)  # B E: each entry's position
        self.stores: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> keys B H E K, values B H E V
        self.new = 0  # entries of the newest step
        self.own = torch.full((beams, beams), -math.inf, device=device, dtype=dtype).fill_diagonal_(0.0)

    def advance(self, tokens: Tensor) -> Tensor:
        """Makes room for the entries of one more step, of `tokens` N; each layer then appends its own.

        Returns the tokens [R] to step with: at the very first step the rows of a sentence begin alike, with bos, and
        R is B: one row stands for all, and all share its entry. Otherwise R is N.
        """
        first = tokens.view(len(self.mask), self.beams)
        if self.used == 0 and bool((first == first[:, :1]).all()):
            tokens = first[:, 0]
            self.new = 1
        else:
            self.new = self.beams
        if self.used + self.new > self.mask.shape[2]:
            self.repack()
        self.position = self.position + 1
        newest = slice(self.used, self.used + self.new)
        self.places[:, newest] = self.position[:, None]
        self.mask[:, :, newest] = self.own if self.new > 1 else 0.0
        self.used += self.new
        return tokens

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Adds the newest tokens' key R H K and value R H V; returns all of the layer's, B H E K and B H E V.

        R is as `advance` says.
        """
        key = key.unflatten(0, (-1, self.new)).transpose(1, 2)  # B H new K
        value = value.unflatten(0, (-1, self.new)).transpose(1, 2)
        if layer not in self.stores:
            self.stores[layer] = self.room(key, self.mask.shape[2]), self.room(value, self.mask.shape[2])
        keys, values = self.stores[layer]
        keys[:, :, self.used - self.new : self.used] = key
        values[:, :, self.used - self.new : self.used] = value
        return keys, values

    def room(self, like: Tensor, entries: int) -> Tensor:
        """Zeros for so many entries of B H … K: what is masked is multiplied too, and must be finite."""
        return like.new_zeros(like.shape[0], like.shape[1], entries, like.shape[3], dtype=self.mask.dtype)

    def visible(self, window: int | None) -> Tensor:
        """What to add to the newest rows' scores: B new E; -inf, too, on what is farther than half of `window`."""
        mask = self.mask[:, : self.new]
        if window is None:
            return mask
        far = self.places < (self.position - window // 2)[:, None]
        return mask.masked_fill(far[:, None], -math.inf)

    def reorder(self, beam_index: Tensor) -> None:
        """Row n goes on from what row beam_index[n] was: N; of the same sentence."""
        self.mask = self.mask.flatten(0, 1)[beam_index].unflatten(0, (-1, self.beams))

    def repack(self) -> None:
        """Drops the entries that no row descends from (of old steps most rows share one ancestor) and makes room."""
        alive = (self.mask == 0).any(1)  # B E
        most = int(alive.sum(1).max())
        room = rounded(most + max(MULTIPLE, self.beams, most // 4))
        kept = (~alive).to(torch.uint8).argsort(dim=1, stable=True)[:, :most]  # B most; the dead ones stay masked
        mask, places = self.mask, self.places
        self.mask = mask.new_full((*mask.shape[:2], room), -math.inf)
        self.mask[:, :, :most] = mask.gather(2, kept[:, None].expand(-1, self.beams, -1))
        self.places = places.new_zeros(len(places), room)
        self.places[:, :most] = places.gather(1, kept)
        for layer, (keys, values) in self.stores.items():
            self.stores[layer] = self.picked(keys, kept, room), self.picked(values, kept, room)
        self.used = most

    def picked(self, store: Tensor, entries: Tensor, room: int) -> Tensor:
        """These entries [B, E] of B H … K, in front of some room."""
        sentences, heads, capacity, width = store.shape
        first = torch.arange(sentences * heads, device=store.device).view(sentences, heads, 1) * capacity
        rows = (first + entries[:, None]).flatten()  # of the keys, end to end: whole rows are copied, unlike by gather
        picked = self.room(store, room)
        picked[:, :, : entries.shape[1]] = store.view(-1, width).index_select(0, rows).view(sentences, heads, -1, width)
        return picked

    def drop_finished(self, sentences: Tensor) -> None:
        """Drops all but these sentences (indices, ascending)."""
        self.mask, self.position = self.mask[sentences], self.position[sentences]
        self.places = self.places[sentences]
        self.stores = {
            layer: (keys.index_select(0, sentences), values.index_select(0, sentences))
            for layer, (keys, values) in self.stores.items()
        }

    def reset(self, slots: Tensor) -> None:
        """The sentences in these slots begin afresh."""
        self.mask[slots] = -math.inf
        self.position = self.position.index_fill(0, slots, -1)


def attend_rows(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attention of the few rows of each sentence to what is kept of it: R H K, B H E K, B H E V -> R H*V.

    `mask`, added to the scores, is B*H Q E, or B*H 1 E, of the type of keys and values, in which the products are
    taken; the softmax is taken in 32 bits. Plain batched products: with so few queries the fused kernels are slower on
    a CPU.
    """
    sentences, heads, _, width = keys.shape
    rows = query.unflatten(0, (sentences, -1)).transpose(1, 2)  # B H Q K
    rows = rows.to(keys.dtype, memory_format=torch.contiguous_format).flatten(0, 1)
    mask = mask.expand(-1, rows.shape[1], -1)
    scores = torch.baddbmm(mask, rows, keys.flatten(0, 1).transpose(1, 2), alpha=width**-0.5)
    weights = scores.softmax(-1, dtype=torch.float32).to(values.dtype)
    attended = torch.bmm(weights, values.flatten(0, 1)).unflatten(0, (sentences, heads))  # B H Q V
    attended = attended.transpose(1, 2).to(query.dtype, memory_format=torch.contiguous_format)
    return attended.reshape(-1, heads * values.shape[-1])
