"""Lines longer than a model should read at once: where to cut them."""

SENTENCE_ENDS = (".", "!", "?", ";", "。", "！", "？", "؟", "।", "…")
SPACE = "▁"  # SentencePiece's word boundary: a piece that begins with it begins a word


def pieces_of(pieces: list[str], limit: int) -> list[int]:
    """Where to cut a line of `pieces` so that no part has more than `limit`: the end of each part, the last one's too.

    It cuts after the last sentence end in reach, else before the last word, else anywhere.
    """
    ends: list[int] = []
    start = 0
    while len(pieces) - start > limit:
        reach = range(start + limit, start, -1)
        end = next((i for i in reach if pieces[i - 1].endswith(SENTENCE_ENDS) and pieces[i].startswith(SPACE)), None)
        if end is None:
            end = next((i for i in reach if pieces[i].startswith(SPACE)), start + limit)
        ends.append(end)
        start = end
    return [*ends, len(pieces)]
