"""Every format gives the same examples; every kind of bad input gives one clear error that names the place."""

import json

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from moekit.config import DataConfig
from moekit.data.dataset import build
from moekit.data.source import CHATS, load_examples
from moekit.errors import DataError

MESSAGES = [
    [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}],
    [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "4"},
    ],
]
RECORDS = [{"messages": m, "extra": i} for i, m in enumerate(MESSAGES)]


def write(path, lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def every_source(folder):
    yield write(folder / "chat.jsonl", RECORDS)
    yield str(write(folder / "again.ndjson", RECORDS))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), folder / "chat.parquet")
    yield folder / "chat.parquet"
    data = datasets.Dataset.from_list(RECORDS)
    yield data
    data.save_to_disk(str(folder / "plain"))
    yield folder / "plain"
    datasets.DatasetDict({"train": data}).save_to_disk(str(folder / "one_split"))
    yield folder / "one_split"
    yield folder / "one_split" / "train"
    yield RECORDS
    yield iter(RECORDS)


def test_all_sources_agree(tmp_path, tokenizer):
    prints = set()
    for source in every_source(tmp_path):
        examples = load_examples(source)
        assert [e.messages for e in examples] == MESSAGES, source
        prints.add(build(examples, tokenizer, DataConfig(length=64)).fingerprint)
    assert len(prints) == 1


def test_where_examples_come_from(tmp_path):
    path = write(tmp_path / "x.jsonl", [RECORDS[0], "", RECORDS[1]])
    assert [e.where for e in load_examples(path)] == [f"{path}, line 1", f"{path}, line 3"]
    assert load_examples(RECORDS)[1].where == "list in memory, row 1"


def test_columns_of_nulls_are_no_fields(tmp_path):
    """Parquet gives every message all keys of all messages, and null where it has none."""
    records = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning": "r"}]}
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "x.parquet")
    # the schema is taken from the first message, so write it out
    message = pyarrow.struct([(k, pyarrow.string()) for k in ("role", "content", "reasoning")])
    table = pyarrow.Table.from_pylist(records, pyarrow.schema([("messages", pyarrow.list_(message))]))
    pyarrow.parquet.write_table(table, tmp_path / "y.parquet")
    assert load_examples(tmp_path / "y.parquet")[0].messages == records[0]["messages"]


def test_prompt_and_completion(tmp_path, tokenizer):
    path = write(tmp_path / "pairs.jsonl", [{"prompt": "hello", "completion": "hi"}])
    assert load_examples(path)[0].messages == MESSAGES[0]
    assert build(path, tokenizer).fingerprint == build(RECORDS[:1], tokenizer).fingerprint
    listed = load_examples([{"prompt": MESSAGES[0], "completion": [{"role": "assistant", "content": "more"}]}])[0]
    assert listed.first == 2 and [m["content"] for m in listed.messages] == ["hello", "hi", "more"]


def with_message(message):
    return {"messages": [{"role": "user", "content": "q"}, message]}


BAD = {
    "broken JSON": ('{"messages": [', r"x\.jsonl, line 2: broken JSON"),
    "not an object": ("[1, 2]", r"line 2: an example must be an object, got list"),
    "other fields": ({"text": "a", "label": 1}, r"line 2: no usable fields among text, label; wanted"),
    "prompt alone": ({"prompt": "a"}, r"line 2: no usable fields among prompt"),
    "no message": ({"messages": []}, r"line 2: 'messages' is empty"),
    "messages not a list": ({"messages": "hello"}, r"line 2: 'messages' must be a list of messages, got str"),
    "message not an object": (with_message("hi"), r"line 2: messages\[1\] must be an object .*got str"),
    "no role": (with_message({"content": "a"}), r"line 2: messages\[1\] has no role \(keys: content\)"),
    "empty role": (with_message({"role": "", "content": "a"}), r"line 2: messages\[1\] has no role"),
    "no content": (with_message({"role": "assistant"}), r"line 2: messages\[1\] \(role 'assistant'\) has no content"),
    "null content": (with_message({"role": "assistant", "content": None}), r"line 2: messages\[1\].*has no content"),
    "number": (
        with_message({"role": "assistant", "content": 4}),
        r"line 2: messages\[1\].*content must be text, got int",
    ),
    "parts": (
        with_message({"role": "assistant", "content": [{"type": "text", "text": "a"}]}),
        "must be text, got list",
    ),
    "unknown role": (
        with_message({"role": "narrator", "content": "x"}),
        r"line 2.*unknown role 'narrator'|no assistant",
    ),
    "no assistant": ({"messages": [{"role": "user", "content": "q"}]}, r"line 2: no assistant message to learn"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_lines(tmp_path, tokenizer, name):
    line, message = BAD[name]
    path = write(tmp_path / "x.jsonl", [RECORDS[0], line])
    with pytest.raises(DataError, match=message):
        build(path, tokenizer)


def test_bad_files(tmp_path):
    with pytest.raises(DataError, match=r"no such file or folder: .*nothing\.jsonl"):
        load_examples(tmp_path / "nothing.jsonl")
    with pytest.raises(DataError, match=r"empty\.jsonl holds no example"):
        load_examples(write(tmp_path / "empty.jsonl", []))
    with pytest.raises(DataError, match="list in memory holds no example"):
        load_examples([])
    (tmp_path / "latin.jsonl").write_bytes('{"messages": "é"}'.encode("latin-1"))
    with pytest.raises(DataError, match=r"latin\.jsonl, line 1: not UTF-8"):
        load_examples(tmp_path / "latin.jsonl")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no PAR1")
    with pytest.raises(DataError, match=r"broken\.parquet: not a readable Parquet file"):
        load_examples(tmp_path / "broken.parquet")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="not a folder written by datasets"):
        load_examples(tmp_path / "folder")
    with pytest.raises(DataError, match=r"data\.csv: data must be a \.jsonl"):
        load_examples(write(tmp_path / "data.csv", ["a,b"]))
    with pytest.raises(DataError, match="got int"):
        load_examples(3)


def test_a_folder_with_several_splits_asks_which(tmp_path):
    data = datasets.Dataset.from_list(RECORDS)
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(str(tmp_path / "two"))
    with pytest.raises(DataError, match="holds the splits train, test; give one, as in .*two/train"):
        load_examples(tmp_path / "two")
    with pytest.raises(DataError, match="choose one split"):
        load_examples(datasets.DatasetDict({"train": data}))


def test_rejecting_goes_on_but_not_past_broken_files(tmp_path):
    seen = []
    path = write(tmp_path / "x.jsonl", [{"messages": []}, RECORDS[0], {"text": 1}])
    assert len(load_examples(path, reject=lambda *what: seen.append(what))) == 1
    assert [(source, line) for source, line, _ in seen] == [(str(path), 1), (str(path), 3)]
    with pytest.raises(DataError, match="none of the 1 examples"):
        load_examples([{"text": 1}], reject=lambda *what: None)
    with pytest.raises(DataError, match="line 1: broken JSON"):
        load_examples(write(tmp_path / "y.jsonl", ["{"]), reject=lambda *what: None)


def test_our_chats_are_plain(tokenizer):
    """Short, two to five messages, unique, ASCII but for nothing: what a tiny tokenizer and model can take."""
    examples = load_examples(CHATS)
    texts = [json.dumps(e.messages) for e in examples]
    assert len(set(texts)) == len(texts)
    for e in examples:
        turns = [m["role"] for m in e.messages if m["role"] != "system"]
        assert turns == ["user", "assistant"] * (len(turns) // 2) and 2 <= len(turns) <= 4
        assert all(m["content"] == m["content"].strip() for m in e.messages)
