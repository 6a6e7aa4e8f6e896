"""Examples from where they are kept: chat or prompt/completion JSONL, Parquet, `datasets` folders and objects.

Every example becomes an `Example`: a list of messages, and where it came from, so that every later message about it
can say which line it was. What cannot be used raises one `DataError` that names file, line and remedy."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import DataError

Progress = Callable[[int, int, str], None]  # progress(done, total, what is being done)
Message = dict[str, Any]

FORMS = 'wanted "messages": [{"role": ..., "content": ...}, ...], or "prompt" and "completion" (both strings or lists)'


@dataclass(frozen=True)
class Example:
    """One conversation. Assistant turns before message `first` belong to a given prompt and are not learned."""

    messages: list[Message]
    source: str = "example"
    index: int = 0  # line number (from 1) in JSONL, else row (from 0)
    first: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)  # what else the record has

    @property
    def where(self) -> str:
        """Source and line or row, for messages."""
        return f"{self.source}, {'line' if self.source.endswith(JSONL) else 'row'} {self.index}"


CHATS = Path(__file__).with_name("chats.jsonl")  # short conversations of our own, for the demo and for trying things
JSONL = (".jsonl", ".ndjson")


def load_examples(source: Any, *, reject: Callable[[str, int, str], None] | None = None) -> list[Example]:
    """Read and check all examples of a data set; see `Example`.
    Args:
        source: a .jsonl or .parquet file; a folder written by `datasets.Dataset.save_to_disk`; a `datasets.Dataset`;
            or a list of dictionaries (or of `Example`).
        reject: what to do with an example that cannot be used: called with (source, index, why), the example is left
            out. None = raise. Broken files always raise.
    Raises DataError: no such file, broken JSON (which line), nothing in it, or an example without usable messages.
    >>> load_examples([{"prompt": "2 + 2 =", "completion": "4"}])[0].messages
    [{'role': 'user', 'content': '2 + 2 ='}, {'role': 'assistant', 'content': '4'}]
    """
    name, records = open_records(source)
    examples, count = [], 0
    for count, (index, record) in enumerate(records, 1):
        try:
            examples.append(record if isinstance(record, Example) else as_example(record, name, index))
        except DataError as problem:
            if reject is None:
                raise
            reject(name, index, str(problem))
    if not count:
        raise DataError(f"{name} holds no example; it is empty")
    if not examples:
        raise DataError(f"none of the {count} examples of {name} can be used; the first reason is in the report")
    return examples


def as_example(record: Any, source: str = "example", index: int = 0) -> Example:
    """A checked `Example` of one dictionary.
    Raises:
        DataError: it has neither form, no message, or a message without role, content or with content that is not text.
    """
    where = Example([], source, index).where
    if not isinstance(record, Mapping):
        raise DataError(f"{where}: an example must be an object, got {_kind(record)}; {FORMS}")
    first = 0
    if record.get("messages") is not None:
        messages = as_messages(record["messages"], "messages", where)
    elif record.get("prompt") is not None and record.get("completion") is not None:
        prompt = as_messages(record["prompt"], "prompt", where, "user")
        completion = as_messages(record["completion"], "completion", where, "assistant")
        messages, first = prompt + completion, len(prompt)
    else:
        raise DataError(f"{where}: no usable fields among {', '.join(map(str, record)) or 'none'}; {FORMS}")
    extra = {name: value for name, value in record.items() if name not in ("messages", "prompt", "completion")}
    return Example(messages, source, index, first, extra)


def as_messages(value: Any, field: str, where: str, text_role: str = "") -> list[Message]:
    """The checked messages of a field; a plain text is one message of `text_role`, where that is given."""
    if text_role and isinstance(value, str):
        return [{"role": text_role, "content": value}]
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, Mapping)):
        raise DataError(f"{where}: {field!r} must be a list of messages, got {_kind(value)}")
    messages = []
    for at, message in enumerate(value):
        at_message = f"{where}: {field}[{at}]"
        if not isinstance(message, Mapping):
            raise DataError(f"{at_message} must be an object with role and content, got {_kind(message)}")
        # Columnar files fill the keys that a message does not have with nulls.
        message = {str(k): v for k, v in message.items() if v is not None}
        role = message.get("role")
        if not isinstance(role, str) or not role:
            keys = ", ".join(message) or "none"
            raise DataError(f'{at_message} has no role (keys: {keys}); wanted "role": "user" ...')
        if "content" not in message:
            raise DataError(f"{at_message} (role {role!r}) has no content (keys: {', '.join(message)})")
        if not isinstance(message["content"], str):
            raise DataError(f"{at_message} (role {role!r}): content must be text, got {_kind(message['content'])}")
        messages.append(message)
    if not messages:
        raise DataError(f"{where}: {field!r} is empty; an example needs at least one message")
    return messages


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def open_records(source: Any) -> tuple[str, Iterator[tuple[int, Any]]]:
    """The name of a data set in any of the forms of `load_examples`, and its records, unchecked, with their places."""
    if isinstance(source, (str, Path)):
        path = Path(source)
        if not path.exists():
            raise DataError(f"no such file or folder: {path}")
        if path.is_dir():
            return str(path), enumerate(_open_folder(path))
        if path.suffix in JSONL:
            return str(path), _json_lines(path)
        if path.suffix == ".parquet":
            return str(path), enumerate(_parquet(path))
        kinds = f"a {', '.join(JSONL)} or .parquet file or a folder from datasets' save_to_disk"
        raise DataError(f"{path}: data must be {kinds}, not {path.suffix or 'a file without suffix'}")
    if isinstance(source, Mapping):  # a datasets.DatasetDict is one, too
        raise DataError(f"got a mapping with keys {', '.join(map(str, source))}; choose one split, or give a list")
    if isinstance(source, Iterable):
        return f"{type(source).__name__} in memory", enumerate(source)
    raise DataError(f"data must be a path, a datasets.Dataset or a list of examples, got {_kind(source)}")


def _json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except UnicodeDecodeError as problem:
                raise DataError(f"{path}, line {number}: not UTF-8 text ({problem})") from None
            except json.JSONDecodeError as problem:
                why = f"{problem.msg} at column {problem.colno}; every line must be one whole JSON object"
                raise DataError(f"{path}, line {number}: broken JSON, {why}") from None


def _parquet(path: Path) -> list[Any]:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowInvalid, OSError) as problem:
        raise DataError(f"{path}: not a readable Parquet file ({str(problem).splitlines()[0]})") from None


def _open_folder(path: Path) -> Iterable[Any]:
    import datasets

    try:
        found = datasets.load_from_disk(str(path))
    except Exception as problem:  # noqa: BLE001 (its error types have changed between versions)
        why = str(problem).splitlines()[0]
        raise DataError(f"{path} is not a folder written by datasets' save_to_disk ({why})") from None
    splits = {str(name): part for name, part in found.items()} if isinstance(found, Mapping) else {"": found}
    if len(splits) != 1:
        raise DataError(f"{path} holds the splits {', '.join(splits)}; give one, as in {path / next(iter(splits))}")
    return next(iter(splits.values()))
