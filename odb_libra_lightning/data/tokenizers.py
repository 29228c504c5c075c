"""Text to token ids without a network: byte-level BPE trained on the spot, or a tokenizer from disk."""

from __future__ import annotations

import hashlib
import os
import random
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

END_OF_TEXT = "<|endoftext|>"
SMALLEST_VOCABULARY = 257  # every byte, and END_OF_TEXT: any text can be written and read back

_FORMAT = 1  # raise it when training changes, so that an old cache file is not taken for a new one
_SAMPLE_BYTES = 2_000_000  # trains in about half a second on one core
_SAMPLE_BYTES_PER_FILE = 32_768  # so that a few huge tables do not decide the vocabulary
_KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "<|im_end|>", "</s>", "<eos>")
_PARALLELISM = "TOKENIZERS_PARALLELISM"


def import_extra(package: str) -> Any:
    """Import a package of the `hf` extra.

    Args:
        package: `"tokenizers"` or `"transformers"`.

    Raises:
        ModuleNotFoundError: the package is missing; the message tells what to install.
    """
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{package} is missing ({error}); install the extra hf, in a clone by: pip install '.[hf]'"
        ) from error


def train_tokenizer(
    files: Sequence[Path], *, vocab_size: int = 4096, cache_dir: str | os.PathLike[str] | None = None
) -> Path:
    """Byte-level BPE for `files`, trained once and kept as JSON.

    At most 2 MB are read, from a seeded choice of the files, so training takes about half a second. The
    same text, size and version of `tokenizers` give the same bytes, and the file appears in one rename: ranks
    that start together may all train, and none reads half a file or waits for another.

    Args:
        files: text files; undecodable bytes are replaced.
        vocab_size: most tokens to learn, at least 257. Little text gives fewer. Id 0 is `<|endoftext|>`.
        cache_dir: where the file is kept, by default `odb-libra-lightning` in `$XDG_CACHE_HOME` or
            `~/.cache`.

    Returns:
        Path of the tokenizer's JSON file.

    Raises:
        ValueError: `vocab_size` below 257, or a cache folder that cannot be written.
        ModuleNotFoundError: `tokenizers` is missing.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise ValueError(
            f"vocab_size={vocab_size} leaves no room for the 256 bytes and {END_OF_TEXT}: "
            f"take at least {SMALLEST_VOCABULARY}"
        )
    tokenizers = import_extra("tokenizers")
    texts = _sample(files)
    key = hashlib.sha256(f"{_FORMAT} {version('tokenizers')} {vocab_size}".encode())
    for text in texts:
        key.update(hashlib.sha256(text.encode()).digest())
    path = _cache_folder(cache_dir) / f"bpe-{vocab_size}-{key.hexdigest()[:20]}.json"
    if path.is_file():
        return path

    byte_level = tokenizers.pre_tokenizers.ByteLevel
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    with _one_rust_thread():
        tokenizer.train_from_iterator(texts, trainer)
    try:
        _write_whole(path, tokenizer.to_str())
    except OSError as error:
        raise ValueError(
            f"cannot keep the trained tokenizer in {path.parent} ({error}): pass cache_dir=<a folder you can write to>"
        ) from error
    return path


@dataclass(frozen=True)
class _Opened:
    pid: int
    backend: Any  # tokenizers.Tokenizer
    end_of_text: str
    special_tokens: re.Pattern[str]
    chat: Any | None  # the Hugging Face tokenizer, where it has a chat template


class TokenizerFile:
    """A tokenizer known by its path, opened at the first use in each process.

    It holds no Rust object until then, so it pickles (spawn) and leaves nothing behind for a forked worker;
    one that was opened before a fork is opened again in the child.

    Args:
        path: a `tokenizer.json`, or a folder written by Hugging Face's `save_pretrained` with a
            `tokenizer.json` in it. Only a folder says which token ends a text and brings a chat template;
            a lone file must have one of `<|endoftext|>`, `<|end_of_text|>`, `<|im_end|>`, `</s>`, `<eos>`.

    Raises:
        ValueError: nothing of the kind at `path`; at first use, a file that cannot be read as a tokenizer.
        ModuleNotFoundError: at first use, `tokenizers` or (for a folder) `transformers` is missing.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser().resolve()
        if not self.path.is_file() and not (self.path / "tokenizer.json").is_file():
            raise ValueError(
                f"tokenizer {str(path)!r} is neither a tokenizer.json nor a folder that holds one: "
                "save a fast tokenizer with tokenizer.save_pretrained(folder) and give that folder"
            )
        self._opened: _Opened | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "_opened": None}

    @property
    def end_of_text(self) -> str:
        """The token that ends a document."""
        return self._open().end_of_text

    @property
    def vocab_size(self) -> int:
        """Number of token ids, special tokens included: the smallest `vocab_size` of a model for it."""
        return int(self._open().backend.get_vocab_size())

    def encode(self, text: str, *, max_length: int | None = None) -> list[int]:
        """Token ids of one document, with the end-of-text token after it.

        What looks like a special token in `text` stays text. What the tokenizer itself puts around a text (a
        first token, say) is kept.

        Args:
            text: the document.
            max_length: most ids to return; the end is cut off, and then no end-of-text token follows.
        """
        opened = self._open()
        opened.backend.encode_special_tokens = True
        if max_length is not None and len(text) > 8 * max_length:
            # Most of a long text would be thrown away. A beginning is enough where it fills the length twice:
            # only its last word can be split otherwise than within the whole.
            ids: list[int] = opened.backend.encode(text[: 8 * max_length]).ids
            if len(ids) >= 2 * max_length:
                return ids[:max_length]
        ids = opened.backend.encode(text).ids
        end = opened.backend.token_to_id(opened.end_of_text)
        if ids[-1:] != [end]:
            ids.append(end)
        return ids[:max_length]

    def encode_markup(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of a rendered chat, whose special tokens count as such, and nothing added.

        Returns:
            The ids, and for each the `(start, end)` of its characters in `text`.
        """
        backend = self._open().backend
        backend.encode_special_tokens = False
        encoding = backend.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens included."""
        return str(self._open().backend.decode(list(ids), skip_special_tokens=False))

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        r"""A chat as text, by the tokenizer's template, else `<|role|>\n{content}{end of text}\n` a turn."""
        opened = self._open()
        if opened.chat is not None:
            return str(opened.chat.apply_chat_template(list(messages), tokenize=False))
        return "".join(f"<|{turn['role']}|>\n{turn['content']}{opened.end_of_text}\n" for turn in messages)

    @property
    def special_tokens(self) -> re.Pattern[str]:
        """Pattern that matches one special token."""
        return self._open().special_tokens

    def _open(self) -> _Opened:
        if self._opened is None or self._opened.pid != os.getpid():
            self._opened = self._read()
        return self._opened

    def _read(self) -> _Opened:
        chat = None
        if self.path.is_dir():
            # Local files only, and no code from the folder: a tokenizer is data.
            loader = import_extra("transformers").AutoTokenizer
            hf = self._parse(lambda: loader.from_pretrained(str(self.path), local_files_only=True))
            backend, ends = hf.backend_tokenizer, [hf.eos_token]
            chat = hf if hf.chat_template else None
        else:
            loader = import_extra("tokenizers").Tokenizer
            backend, ends = self._parse(lambda: loader.from_file(str(self.path))), list(_KNOWN_ENDS)
        end = next((token for token in ends if token and backend.token_to_id(token) is not None), None)
        if end is None:
            raise ValueError(
                f"tokenizer {self.path} names no token that ends a text: give a folder of Hugging Face's "
                f"save_pretrained with an eos_token, or a tokenizer.json with one of {', '.join(_KNOWN_ENDS)}"
            )
        backend.no_truncation()  # a saved file may carry both; lengths are the dataset's business
        backend.no_padding()
        special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
        longest_first = sorted(special | {end}, key=len, reverse=True)
        pattern = re.compile("|".join(map(re.escape, longest_first)))
        return _Opened(os.getpid(), backend, end, pattern, chat)

    def _parse(self, read: Any) -> Any:
        try:
            return read()
        except Exception as error:  # the Rust side raises plain Exception
            raise ValueError(f"{self.path} cannot be read as a tokenizer: {error}") from error


def _sample(files: Sequence[Path]) -> list[str]:
    """Beginnings of a seeded choice of files, together at most about `_SAMPLE_BYTES`."""
    texts, left = [], _SAMPLE_BYTES
    for path in random.Random(0).sample(list(files), len(files)):
        with path.open("rb") as file:
            start = file.read(min(left, _SAMPLE_BYTES_PER_FILE))
        texts.append(start.decode(errors="replace"))
        left -= len(start)
        if left <= 0:
            break
    return texts


def _cache_folder(cache_dir: str | os.PathLike[str] | None) -> Path:
    if cache_dir is not None:
        return Path(cache_dir).expanduser().resolve()
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG rule: a relative path counts as unset.
    return (base if base.is_absolute() else Path.home() / ".cache") / "odb-libra-lightning"


def _write_whole(path: Path, text: str) -> None:
    """Write `path` so that it exists either not at all or complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.parent, prefix=f".{path.stem}-", delete=False
    ) as file:
        partial = Path(file.name)
        try:
            file.write(text)
            file.flush()
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


@contextmanager
def _one_rust_thread() -> Iterator[None]:
    """Keep `tokenizers` from starting its thread pool.

    A process forked after the pool has started (the DataLoader's workers) would warn, and could wait for
    threads that do not exist in it. The library is told through the environment and in no other way.
    """
    before = os.environ.get(_PARALLELISM)
    os.environ[_PARALLELISM] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_PARALLELISM]
        else:
            os.environ[_PARALLELISM] = before
