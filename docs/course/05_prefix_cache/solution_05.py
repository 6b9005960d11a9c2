"""Solution 5."""

Key = tuple[int | None, tuple[int, ...]]


def match_prefix(cache: dict[Key, int], token_ids: list[int], block_size: int) -> list[int]:
    found: list[int] = []
    before: int | None = None
    for end in range(block_size, len(token_ids), block_size):  # never up to the last token
        before = cache.get((before, tuple(token_ids[end - block_size : end])))
        if before is None:
            break
        found.append(before)
    return found
