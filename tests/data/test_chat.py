"""Conversations: what is rendered, what is masked, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast

from odb_libra_lightning.data.chat import ChatMessages

END = "<|endoftext|>"
SPECIALS = ["<|im_start|>", "<|im_end|>", "<s>", "</s>"]
EXAMPLES = Path(__file__).parents[2] / "examples" / "chat.jsonl"

CHATML = """
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{{ m.content | trim }}<|im_end|>
{% endfor %}"""
# The system message goes into the first user's turn, blanks surround every content.
INSTRUCT = """
{%- set ns = namespace(system='') -%}
{%- for m in messages -%}
{%- if m.role == 'system' -%}{%- set ns.system = m.content ~ ' // ' -%}
{%- elif m.role == 'user' -%}{{ '<s>[INST] ' ~ ns.system ~ m.content ~ ' [/INST]' }}{%- set ns.system = '' -%}
{%- else -%}{{ ' ' ~ m.content ~ ' </s>' }}{%- endif -%}
{%- endfor -%}"""
NO_MARKER = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
REWRITES = "{% for m in messages %}{{ m.role }}: {{ m.content.split('</think>')[-1] }}</s>{% endfor %}"
REFUSES = "{{ raise_exception('roles must alternate') }}"


def code(text: str) -> list[int]:
    """Ids of the byte tokenizer below, written down independently: a byte is itself plus one, END is 0."""
    pieces = text.split(END)
    ids = [byte + 1 for byte in pieces[0].encode()]
    for piece in pieces[1:]:
        ids += [0, *(byte + 1 for byte in piece.encode())]
    return ids


def byte_tokenizer() -> Tokenizer:
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    characters = {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE({END: 0} | {c: byte + 1 for byte, c in characters.items()}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    return tokenizer


@pytest.fixture
def byte_file(tmp_path: Path) -> Path:
    path = tmp_path / "bytes.json"
    byte_tokenizer().save(str(path))
    return path


def hugging_face_folder(folder: Path, template: str | None) -> Path:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(SPECIALS)
    hf = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    hf.chat_template = template
    hf.save_pretrained(folder)
    return folder


def turns(*pairs: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in pairs]}


def jsonl(tmp_path: Path, *records: Any) -> Path:
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    return path


def answers(data: ChatMessages, index: int) -> list[str]:
    """Text of each unbroken run of unmasked labels."""
    runs: list[list[int]] = []
    previous = -100
    for label in data[index]["labels"].tolist():
        if label != -100:
            if previous == -100:
                runs.append([])
            runs[-1].append(label)
        previous = label
    return [data.tokenizer.decode(run) for run in runs]


LONG = turns(("system", "Be brief."), ("user", "Hi"), ("assistant", "Yo"), ("user", "Bye"), ("assistant", "Ciao é😀"))


def test_exact_ids_and_labels_of_the_plain_template(tmp_path: Path, byte_file: Path) -> None:
    data = ChatMessages(jsonl(tmp_path, turns(("user", "Hi"), ("assistant", "Yo"))), tokenizer=byte_file)
    prompt = code(f"<|user|>\nHi{END}\n<|assistant|>\n")
    answer = code(f"Yo{END}")
    assert data[0]["input_ids"].tolist() == prompt + answer + code("\n")
    assert data[0]["labels"].tolist() == [-100] * len(prompt) + answer + [-100]
    assert data[0]["input_ids"].dtype == data[0]["labels"].dtype == torch.int64


def test_every_answer_of_a_longer_chat_is_unmasked_and_nothing_else(tmp_path: Path, byte_file: Path) -> None:
    data = ChatMessages(jsonl(tmp_path, LONG), tokenizer=byte_file)
    expected = (
        f"<|system|>\nBe brief.{END}\n<|user|>\nHi{END}\n<|assistant|>\nYo{END}\n"
        f"<|user|>\nBye{END}\n<|assistant|>\nCiao é😀{END}\n"
    )
    assert data[0]["input_ids"].tolist() == code(expected)
    assert answers(data, 0) == [f"Yo{END}", f"Ciao é😀{END}"]


def test_white_space_and_repeated_text_are_kept_apart(tmp_path: Path, byte_file: Path) -> None:
    """The answer also occurs in the prompt and in a role's name; an empty one is only its end marker."""
    record = turns(("user", "s"), ("assistant", "s"), ("user", "\ue0000\ue001"), ("assistant", ""))
    record["messages"].append({"role": "assistant", "content": "  x\n"})
    data = ChatMessages(jsonl(tmp_path, record), tokenizer=byte_file)
    assert answers(data, 0) == [f"s{END}", END, f"  x\n{END}"]
    text = data.tokenizer.decode(data[0]["input_ids"].tolist())
    assert text == data.tokenizer.render_chat(record["messages"])


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, ["Yo<|im_end|>", "Ciao é😀<|im_end|>"]),
        (INSTRUCT, ["Yo </s>", "Ciao é😀 </s>"]),
        (NO_MARKER, ["Yo", "Ciao é😀"]),
    ],
    ids=["chatml", "instruct", "no marker"],
)
def test_a_template_of_hugging_face_renders_and_masks(tmp_path: Path, template: str, expected: list[str]) -> None:
    folder = hugging_face_folder(tmp_path / "hf", template)
    data = ChatMessages(jsonl(tmp_path, LONG), tokenizer=folder)
    hf = PreTrainedTokenizerFast.from_pretrained(folder)
    whole = hf.apply_chat_template(LONG["messages"], tokenize=False)
    assert data[0]["input_ids"].tolist() == hf(whole, add_special_tokens=False)["input_ids"]
    assert answers(data, 0) == expected


def test_a_template_that_trims_is_followed(tmp_path: Path) -> None:
    record = turns(("user", " Hi \n"), ("assistant", "\n Yo "))
    data = ChatMessages(jsonl(tmp_path, record), tokenizer=hugging_face_folder(tmp_path / "hf", CHATML))
    text = data.tokenizer.decode(data[0]["input_ids"].tolist())
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n"
    assert answers(data, 0) == ["Yo<|im_end|>"]


def test_a_folder_without_a_template_uses_the_plain_one(tmp_path: Path) -> None:
    folder = hugging_face_folder(tmp_path / "hf", None)
    data = ChatMessages(jsonl(tmp_path, turns(("user", "Hi"), ("assistant", "Yo"))), tokenizer=folder)
    text = data.tokenizer.decode(data[0]["input_ids"].tolist())
    assert text == "<|user|>\nHi<|im_end|>\n<|assistant|>\nYo<|im_end|>\n"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (REFUSES, "chat.jsonl, line 1: the tokenizer's chat template refuses it: roles must alternate"),
        (REWRITES, "chat.jsonl, line 1: the tokenizer's chat template rewrites or drops a content"),
    ],
)
def test_a_template_that_cannot_be_followed_is_named(tmp_path: Path, template: str, message: str) -> None:
    record = turns(("user", "Hi"), ("assistant", "<think>hm</think>Yo"))
    data = ChatMessages(jsonl(tmp_path, record), tokenizer=hugging_face_folder(tmp_path / "hf", template))
    with pytest.raises(ValueError, match=message):
        data[0]


@pytest.mark.parametrize("max_length", [1, 20, 30, 500])
def test_a_long_chat_loses_its_end(tmp_path: Path, byte_file: Path, max_length: int) -> None:
    path = jsonl(tmp_path, LONG)
    whole = ChatMessages(path, tokenizer=byte_file)[0]
    cut = ChatMessages(path, tokenizer=byte_file, max_length=max_length)[0]
    for key in ("input_ids", "labels"):
        assert torch.equal(cut[key], whole[key][:max_length])
    assert bool((cut["labels"] == -100).all()) is (max_length < 50)  # the first answer starts after 50 tokens


def test_lines_are_found_by_their_bytes(tmp_path: Path, byte_file: Path) -> None:
    """Blank lines, letters of several bytes and a missing last newline."""
    path = tmp_path / "chat.jsonl"
    records = [turns(("user", "é😀" * i), ("assistant", str(i))) for i in range(5)]
    path.write_text("\n\n" + "\n \n".join(json.dumps(record, ensure_ascii=False) for record in records))
    data = ChatMessages(path, tokenizer=byte_file)
    assert len(data) == 5
    assert [answers(data, i) for i in (4, 0, 3, 2, 1)] == [[f"{i}{END}"] for i in (4, 0, 3, 2, 1)]


GOOD = json.dumps(turns(("user", "Hi"), ("assistant", "Yo")))


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{not json", "not valid JSON"),
        (b"\xff\xfe{", "not valid JSON"),
        ("[1, 2]", 'no "messages"'),
        ('{"text": "x"}', 'no "messages"'),
        ('{"messages": []}', 'no "messages"'),
        ('{"messages": "hello"}', 'no "messages"'),
        ('{"messages": ["hello"]}', "turn 1 has no text as its content"),
        ('{"messages": [{"role": "user", "content": null}]}', "turn 1 has no text as its content"),
        (json.dumps(turns(("user", "Hi"), ("tool", "42"))), "turn 2 has the unknown role 'tool'"),
        (json.dumps(turns(("user", "Hi"))), "no turn of the assistant"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, byte_file: Path, line: str | bytes, what: str) -> None:
    path = tmp_path / "chat.jsonl"
    raw = line if isinstance(line, bytes) else line.encode()
    path.write_bytes(GOOD.encode() + b"\n\n" + raw + b"\n")
    with pytest.raises(ValueError, match=f'chat.jsonl, line 3: {what}.*; expected {{"messages"') as caught:
        ChatMessages(path, tokenizer=byte_file)
    assert "\n" not in str(caught.value)


def test_a_bad_file_or_argument_is_named(tmp_path: Path, byte_file: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n \n")
    with pytest.raises(ValueError, match=r"empty\.jsonl is empty; expected lines like"):
        ChatMessages(empty, tokenizer=byte_file)
    with pytest.raises(ValueError, match=r"missing\.jsonl is not a file; expected JSONL"):
        ChatMessages(tmp_path / "missing.jsonl", tokenizer=byte_file)
    with pytest.raises(ValueError, match="max_length=0 leaves no token"):
        ChatMessages(EXAMPLES, max_length=0, tokenizer=byte_file)


def test_spawned_workers_read_the_same_samples(tmp_path: Path, byte_file: Path) -> None:
    data = ChatMessages(jsonl(tmp_path, LONG, turns(("user", "Hi"), ("assistant", "Yo"))), tokenizer=byte_file)
    loader = DataLoader(data, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    for here, there in zip((data[i] for i in range(2)), loader, strict=True):
        assert torch.equal(here["input_ids"], there["input_ids"])
        assert torch.equal(here["labels"], there["labels"])


def test_the_examples_are_whole_and_of_very_different_length(tmp_path: Path) -> None:
    data = ChatMessages(EXAMPLES, cache_dir=tmp_path)
    assert len(data) >= 60
    lengths = torch.tensor([len(data[i]["input_ids"]) for i in range(len(data))], dtype=torch.float64)
    assert lengths.std() / lengths.mean() > 1
    for i, line in enumerate(EXAMPLES.read_text().splitlines()):
        expected = [m["content"] + END for m in json.loads(line)["messages"] if m["role"] == "assistant"]
        assert answers(data, i) == expected
