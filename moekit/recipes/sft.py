"""Supervised fine-tuning on chats, as one loop: read, mask, pack, step, record, save, export.

    moekit.submit(train, SFTConfig(model="path/to/olmoe", data="chats.jsonl"), nproc=2)     several processes
    train(SFTConfig(model="path/to/olmoe", data="chats.jsonl"))                            this process, one rank

Everything is checked before anything is written (`moekit.recipes.setup`). A run that was stopped goes on with
`resume=True`, bitwise as if it had never stopped."""

import time
from typing import Any

from ..config import SFTConfig
from ..data.dataset import build
from ..data.pack import Rows, check_vocabulary
from ..data.stream import RowStream
from ..learner.learner import Learner
from ..objectives.sft import SFT
from . import runs
from .runs import Recorder


def train(config: SFTConfig) -> dict[str, Any]:
    """Fine-tune a model on the assistant's turns of chats. Every rank calls it.
    Args: `config`: see `moekit.SFTConfig`. `out=None` takes the job's folder, or a new one under runs/.
    Returns: What came out, the same on every rank: run folder, steps, first and last loss, tokens and rows, rates,
        checkpoint and export. All of it, and more, is in the run folder.
    Raises:
        DataError, ConfigError, CheckpointError, NumericsError, RunExistsError, StorageError: bad input, on all ranks,
            before anything is written."""

    def load(tokenizer: Any, shape: Any) -> Rows:
        rows = build(config.data, tokenizer, config.rows)
        check_vocabulary(rows, shape.vocab)
        return rows

    run = runs.begin(config, "sft", load)
    learner = Learner(run.model(), SFT(config.denominator, config.constant_length), config.learner, run.world)
    stream = RowStream(run.data, config.batch_rows, config.rows.seed, config.rows.shuffle)
    start, state = runs.continued(run, learner)
    runs.restore_stream(run, stream, state)
    objective = {"denominator": config.denominator, "constant_length": config.constant_length}
    batch = {"rows of a step": config.batch_rows, "rows of a microbatch": config.microbatch_rows,
             "rows": config.rows.to_dict()}  # fmt: skip
    shown = {"loss": "loss/sft", "supervised_tokens/s": "rate/supervised_tokens_s"}
    with Recorder(run, learner, start, objective=objective, batch=batch, shown=shown) as record:
        for step in range(start, config.steps):
            began = time.perf_counter()
            batches = stream.next(learner.mesh.dp.rank, learner.mesh.dp.size, config.microbatch_rows)
            ready = time.perf_counter() - began
            metrics = learner.step(batches)
            metrics |= {"data/epoch": stream.epoch, "data/row": stream.position, "time/data_s": ready}
            record.step(step, metrics, learner.counter.arrays(), stream.state())
    return record.finish()
