"""What followed the endings of a text, by looking at every place of all texts: the oracle of drafters that count."""

from __future__ import annotations

from collections import Counter

Texts = list[list[int]]


def behind(texts: Texts, ending: list[int]) -> dict[int, int]:
    """What followed `ending`, and how often, by looking at every place."""
    size = len(ending)
    return dict(Counter(t[i + size] for t in texts for i in range(len(t) - size) if t[i : i + size] == ending))


def longest_continued(texts: Texts, context: list[int], longest: int) -> tuple[int, dict[int, int]]:
    """Length of the longest ending of `context` that something followed, and what did."""
    for size in range(min(longest, len(context)), 0, -1):
        if found := behind(texts, context[len(context) - size :]):
            return size, found
    return 0, {}


def searched(texts: Texts, context: list[int], longest: int, num_tokens: int) -> tuple[list[int], float]:
    """The most frequent continuation, token by token, and how much of it is expected to be right."""
    drafted: list[int] = []
    path, expected = 1.0, 0.0
    for _ in range(num_tokens):
        _, found = longest_continued(texts, context + drafted, longest)
        if not found:
            break
        token = min(found, key=lambda t: (-found[t], t))
        path *= found[token] / sum(found.values())
        expected += path
        drafted.append(token)
    return drafted, expected
