"""From a data set to rows in one call: read, render, mask, cut, arrange, filter, and report."""

from typing import Any

from ..config import DataConfig
from .chat import load_tokenizer, render_all
from .pack import Rows, build_rows
from .report import Report
from .source import Progress, load_examples


def build(
    data: Any, tokenizer: Any, config: DataConfig | None = None, *, reject: bool = False,
    progress: Progress | None = None,
) -> Rows:  # fmt: skip
    """Rows of fixed length from chats. `rows.report` says what became of every example.
    Args:
        data: a .jsonl or .parquet file, a folder of `datasets`, a `datasets.Dataset`, or a list of dictionaries.
        tokenizer: a Hugging Face tokenizer with a chat template, or its folder.
        config: how examples become rows.
        reject: leave out examples that cannot be used, and report them. False (default) = raise at the first.
        progress: called as `progress(done, total, stage)` while rendering.
    Raises DataError: the data cannot be used as given; names the line."""
    config = DataConfig() if config is None else config
    tokenizer = load_tokenizer(tokenizer)
    report = Report()

    def leave_out(source: str, index: int, why: str) -> None:
        report.counts["examples"] += 1
        report.add(source, index, "rejected", why)

    examples = load_examples(data, reject=leave_out if reject else None)
    documents = render_all(examples, tokenizer, config.supervise, report=report, reject=reject, progress=progress)
    return build_rows(documents, config, pad_id=pad_id(tokenizer), report=report)


def pad_id(tokenizer: Any) -> int:
    """The id at padding positions: the tokenizer's padding token, else its end-of-text token, else 0.

    Padding is known by its place (segment -1), never by its id, so any id will do."""
    return next((int(i) for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
