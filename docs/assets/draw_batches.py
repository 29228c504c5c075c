"""Draws `batches.svg`: the same conversations in fixed batches and in online ones. Run from the repository's root."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from odb_libra_lightning.data.chat import ChatMessages
from odb_libra_lightning.odb import group_by_budget
from odb_libra_lightning.odb.padding import padding_ratio

SAMPLES, L_MAX, FIXED = 56, 4096, 4
ROW, GAP, WIDTH, TOP = 5, 7, 400, 44
TOKENS, PADDING, INK = "#3b6ea8", "#e3c9a8", "#444"


def main() -> None:
    """Tokenize the example chats, batch them both ways, and write the SVG beside this file."""
    chats = ChatMessages("examples/chat.jsonl")
    lengths = [len(chats[int(i)]["input_ids"]) for i in np.random.default_rng(0).permutation(len(chats))[:SAMPLES]]
    fixed = [lengths[i : i + FIXED] for i in range(0, SAMPLES, FIXED)]
    groups, tail = group_by_budget(lengths, L_MAX)
    online = [[lengths[i] for i in group] for group in [*groups, tail] if group]
    columns = [(f"fixed batches of {FIXED}", fixed), (f"online batches, at most {L_MAX:,} tokens", online)]
    parts = [draw(batches, title, x=10 + i * (WIDTH + 40)) for i, (title, batches) in enumerate(columns)]
    height = TOP + max(sum(len(batch) * ROW + GAP for batch in batches) for _, batches in columns) + 30
    legend = (
        f'<rect x="10" y="{height - 22}" width="14" height="10" fill="{TOKENS}"/>'
        f'<text x="30" y="{height - 13}">tokens</text>'
        f'<rect x="100" y="{height - 22}" width="14" height="10" fill="{PADDING}"/>'
        f'<text x="120" y="{height - 13}">padding</text>'
        f'<text x="200" y="{height - 13}">one line a conversation, {SAMPLES} of examples/chat.jsonl</text>'
    )
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH + 60} {height}" font-family="sans-serif" '
        f'font-size="13" fill="{INK}"><rect width="100%" height="100%" fill="white"/>{"".join(parts)}{legend}</svg>\n'
    )
    Path(__file__).with_name("batches.svg").write_text(svg, encoding="utf-8")


def draw(batches: list[list[int]], title: str, *, x: int) -> str:
    """One column: a block a batch, a line a conversation."""
    ratio = padding_ratio(sum(map(sum, batches)), sum(len(batch) * max(batch) for batch in batches))
    scale = WIDTH / max(map(max, batches))
    parts = [
        f'<text x="{x}" y="18" font-weight="bold">{title}</text>',
        f'<text x="{x}" y="35">{len(batches)} batches, {ratio:.0%} of the computation is padding</text>',
    ]
    y = TOP
    for batch in batches:
        longest = max(batch) * scale
        for length in batch:
            parts.append(f'<rect x="{x}" y="{y}" width="{longest:.1f}" height="{ROW - 1}" fill="{PADDING}"/>')
            parts.append(f'<rect x="{x}" y="{y}" width="{length * scale:.1f}" height="{ROW - 1}" fill="{TOKENS}"/>')
            y += ROW
        y += GAP
    return "".join(parts)


if __name__ == "__main__":
    main()
