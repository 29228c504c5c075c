"""Conversations from a JSONL file, with everything but the assistant's answers masked."""

from __future__ import annotations

import json
import os
import re
from array import array
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from odb_libra_lightning.data.collators import IGNORED
from odb_libra_lightning.data.source_files import find_files
from odb_libra_lightning.data.tokenizers import TokenizerFile, train_tokenizer

ROLES = ("system", "user", "assistant")

_EXPECTED = '{"messages": [{"role": "system|user|assistant", "content": "..."}]}'
_PLACE = re.compile("\ue000([0-9]+)\ue001")  # private-use characters: no template writes them

Messages = list[dict[str, str]]


class ChatMessages(Dataset[dict[str, Tensor]]):
    r"""Conversations as token ids, one a sample, trained on the assistant's answers alone.

    A line of the file is `{"messages": [{"role": "system|user|assistant", "content": "..."}]}`; blank lines
    do not count. Construction checks every line and notes where it starts; the text stays in the file and
    becomes tokens in `__getitem__`, so in the DataLoader's worker.

    A conversation is rendered by the tokenizer's own chat template, else a turn is
    `<|role|>\n{content}{end of text}\n`. In `labels` an answer and the special token that ends it keep their
    ids, everything else is -100.

    Args:
        path: the JSONL file, UTF-8.
        max_length: most tokens a sample; the end of a longer conversation is cut off. What is left may hold
            no answer at all: then every label is -100.
        tokenizer: path of a `tokenizer.json` or of a Hugging Face tokenizer's folder. By default the one that
            `SourceFiles()` trains on the standard library, so that two chat files speak the same tokens.
        vocab_size: size of that one, at least 257; ignored where `tokenizer` is given.
        cache_dir: where that one is kept, see `train_tokenizer`.

    Attributes:
        tokenizer: the `TokenizerFile`; give its `path` to another dataset that must share it.

    Raises:
        ValueError: no such file, an empty one, a line that is no conversation (with its number), or at
            `__getitem__` a chat template that refuses or rewrites a conversation.
        ModuleNotFoundError: the `hf` extra is missing.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_length: int | None = None,
        tokenizer: str | os.PathLike[str] | None = None,
        vocab_size: int = 4096,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        if max_length is not None and max_length < 1:
            raise ValueError(f"max_length={max_length} leaves no token: take at least 1, or None for all")
        self.path = Path(path).expanduser().resolve()
        if not self.path.is_file():
            raise ValueError(f"{self.path} is not a file; expected JSONL with lines like {_EXPECTED}")
        self._offsets = array("q")  # bytes
        self._line_numbers = array("q")
        self._index_lines()
        if tokenizer is None:
            tokenizer = train_tokenizer(find_files(), vocab_size=vocab_size, cache_dir=cache_dir)
        self.max_length = max_length
        self.tokenizer = TokenizerFile(tokenizer)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One conversation.

        Returns:
            `input_ids` and `labels`, both int64 `[tokens]`, unshifted: the model shifts.
        """
        where = f"{self.path}, line {self._line_numbers[index]}"
        with self.path.open("rb") as file:
            file.seek(self._offsets[index])
            messages = _parse(file.readline(), where)
        text, answers = _render(messages, self.tokenizer, where)
        ids, places = self.tokenizer.encode_markup(text)
        input_ids = torch.tensor(ids[: self.max_length], dtype=torch.long)
        labels = torch.full_like(input_ids, IGNORED)
        for position, (start, end) in enumerate(places[: self.max_length]):
            # A token that reaches over the edge (" word" with the template's blank) is the model's to write.
            if any(end > first and start < last for first, last in answers):
                labels[position] = input_ids[position]
        return {"input_ids": input_ids, "labels": labels}

    def _index_lines(self) -> None:
        offset = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    _parse(line, f"{self.path}, line {number}")
                    self._offsets.append(offset)
                    self._line_numbers.append(number)
                offset += len(line)
        if not self._offsets:
            raise ValueError(f"{self.path} is empty; expected lines like {_EXPECTED}")


def _parse(line: bytes, where: str) -> Messages:
    """The turns of one line, checked."""

    def refuse(what: str) -> ValueError:
        return ValueError(f"{where}: {what}; expected {_EXPECTED}")

    try:
        record: Any = json.loads(line)
    except ValueError as error:  # bad JSON, or bytes that are no text
        raise refuse(f"not valid JSON ({getattr(error, 'msg', error)})") from error
    turns = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(turns, list) or not turns:
        raise refuse('no "messages", or not a list of turns')
    messages: Messages = []
    for turn in turns:
        if not isinstance(turn, dict) or not isinstance(turn.get("content"), str):
            raise refuse(f"turn {len(messages) + 1} has no text as its content")
        if turn.get("role") not in ROLES:
            raise refuse(f"turn {len(messages) + 1} has the unknown role {turn.get('role')!r}")
        messages.append({"role": turn["role"], "content": turn["content"]})
    if all(turn["role"] != "assistant" for turn in messages):
        raise refuse("no turn of the assistant, so nothing to learn")
    return messages


def _render(messages: Messages, tokenizer: TokenizerFile, where: str) -> tuple[str, list[tuple[int, int]]]:
    """A conversation as text, and the `(start, end)` characters of its answers with their end markers.

    A template does not say where it puts a content. So it is run a second time on numbered placeholders,
    which shows what stands around each, and the contents are put in their places.
    """
    numbered = [{**turn, "content": f"\ue000{i}\ue001"} for i, turn in enumerate(messages)]
    try:
        whole = tokenizer.render_chat(messages)
        frame = _PLACE.split(tokenizer.render_chat(numbered))  # text, number, text, number, ..., text
    except Exception as error:  # templates refuse with errors of their own, "roles must alternate" for one
        raise ValueError(f"{where}: the tokenizer's chat template refuses it: {error}") from error
    for trim in (str, str.strip):  # many templates trim the contents
        text, answers = frame[0], []
        for number, after in zip(frame[1::2], frame[2::2], strict=True):
            turn = messages[int(number)]
            start = len(text)
            text += trim(turn["content"])
            if turn["role"] == "assistant":
                blank = len(after) - len(after.lstrip())
                marker = tokenizer.special_tokens.match(after, blank)
                answers.append((start, len(text) + (marker.end() if marker else 0)))
            text += after
        if text == whole and answers:
            return text, answers
    raise ValueError(
        f"{where}: the tokenizer's chat template rewrites or drops a content, so its answers cannot be told "
        "from the rest; change the contents, or the chat_template in the tokenizer's folder"
    )
