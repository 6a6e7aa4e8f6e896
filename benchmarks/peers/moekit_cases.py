"""moekit's column in the peer benches: pass ``--extra moekit_cases.py`` to train_step.py, sft.py, checkpoint.py,
moe_ffn.py, dpo.py or grpo.py.

The peer's weights are loaded into moekit's model through a Hugging Face folder and the losses are compared before
anything is timed (relative 1e-5 in float32, 1e-2 in bfloat16). Our bfloat16 is bf16 parameters and gradients of bf16
matmuls, accumulated in float32, with float32 masters and moments; the peer's is pure bf16, optimizer included.
"""

import logging
import shutil
import tempfile
from pathlib import Path

import peers
import torch

from moekit import Batch, DataConfig, Learner, LearnerConfig, load, ops
from moekit.checkpoint.intervals import Piece
from moekit.checkpoint.load import open_checkpoint
from moekit.checkpoint.write import save_state
from moekit.data.chat import Document
from moekit.data.pack import build_rows
from moekit.data.stream import RowStream
from moekit.learner.mesh import World
from moekit.objectives.sft import SFT

SETTINGS = {"lr": 1e-5, "weight_decay": 0.01, "betas": (0.9, 0.999), "clip_norm": None}
logging.disable(logging.WARNING)


def learner(config, dtype, elide):
    """A learner with the weights of the peers' model, and that model."""
    theirs = peers.olmoe(config, getattr(torch, dtype), "grouped_mm")
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = load(folder, dtype=dtype)
    return Learner(ours, SFT(), LearnerConfig(**SETTINGS, elide=elide)), theirs


def rows_of(batch):
    """The harness's batch as a moekit `Batch`: documents start where positions restart, labels shift inside them."""
    ids, position = batch["input_ids"], batch["position_ids"]
    segment = (position == 0).cumsum(1) - 1
    shifted = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    ends = torch.nn.functional.pad(position[:, 1:] == 0, (0, 1), value=True)
    if (shifted[:, :-1][ends[:, :-1]] != -100).any():
        raise ValueError("the harness's labels cross documents; the two losses would differ")
    return Batch.make(ids, labels=shifted, segment=segment)


def cases(bench, **context):
    """Callables by name, for the bench that asks."""
    if bench in ("dpo", "grpo"):
        import moekit_rl

        return getattr(moekit_rl, bench)(**context)
    found = {"a_train_step": train_step, "b_sft": sft, "f_moe_ffn": moe_ffn, "g_checkpoint": checkpoint}
    return found.get(bench, lambda **_: {})(**context)


def train_step(config, dtype, batch, **_):
    """One whole step: rows seen flat, forward, backward, AdamW."""
    if dtype == "autocast":
        return {}  # moekit has no autocast: a dtype is chosen once, for the parameters
    out = {}
    for elide in ("padding", "padding+last_layer"):
        mine, theirs = learner(config, dtype, elide)
        with torch.no_grad():
            want = theirs(**batch, use_cache=False).loss.item()
        got = mine.step([rows_of(batch)])["loss/sft"]
        tolerance = 1e-5 if dtype == "float32" else 1e-2
        if abs(got - want) > tolerance * abs(want):
            raise ValueError(f"losses differ: moekit {got}, peer {want}")
        peers.note(f"{config} {dtype} {elide}: first loss moekit {got:.7f}, peer {want:.7f}")
        out[f"moekit, elide {elide}"] = lambda mine=mine: mine.step([rows_of(batch)])
    return out


def sft(config, texts, steps, **_):
    """Packed rows through the stream, 4 rows a step, the first two steps left out."""
    documents = [Document([*p, *c], [False] * len(p) + [True] * len(c)) for p, c in texts]
    rows = build_rows(documents, DataConfig(length=peers.SEQ, rows="packed"))

    def case(dtype):
        mine, _ = learner(config, dtype, "padding+last_layer")
        stream = RowStream(rows, batch_rows=4)

        def run():
            tokens = supervised = t0 = 0
            for k in range(steps + 2):
                if k == 2:
                    t0, tokens, supervised = peers.clock(), 0, 0
                metrics = mine.step(stream.next())
                tokens += int(metrics["tokens/supervised"] + metrics["tokens/context"])
                supervised += int(metrics["tokens/supervised"])
            return peers.clock() - t0, tokens, supervised

        return run

    return {"moekit, packed, fp32": case("float32"), "moekit, packed, bf16 weights": case("bfloat16")}


def moe_ffn(x, index, weight, gate_up, down, **_):
    """One layer, forward and backward: fresh weight gradients, and gradients in float32 slots, overwritten."""
    experts, dy = gate_up.shape[0], torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x.dtype)

    def case(*weights):
        leaves = (x, weight, *weights)

        def run():
            torch.autograd.backward(ops.moe_ffn(x, ops.sort_rows(index, experts), weight, *weights), dy)
            for t in leaves:
                t.grad = None
                if hasattr(t, "grad_slot"):
                    t.grad_slot.filled = False

        return run

    slotted = [t.detach().requires_grad_() for t in (gate_up, down)]
    for t in slotted:
        t.grad_slot = ops.GradSlot(torch.zeros(t.shape))
    before = ops.set_backend("reference")
    want = ops.moe_ffn(x, ops.sort_rows(index, experts), weight, gate_up, down)
    ops.set_backend(before)
    got = ops.moe_ffn(x, ops.sort_rows(index, experts), weight, gate_up, down)
    if (got - want).norm() > (1e-5 if x.dtype == torch.float32 else 1e-2) * want.norm():
        raise ValueError("moekit's forms differ")
    return {"moekit": case(gate_up, down), "moekit, grad slots": case(*slotted)}


def checkpoint(state, folder, **_):
    """One rank that owns everything. Saves are synced and checksummed; loads are into new values, checked or not."""
    path, world = Path(folder) / "moekit", World()
    entries = [(Piece.whole(n, t.shape), t.view(-1)) for n, t in state.items()]
    targets = [(p, torch.zeros_like(t)) for p, t in entries]

    def save(asynchronous=False):
        shutil.rmtree(path, ignore_errors=True)  # as the other cases do
        return save_state(path, {"master": entries}, {}, world=world, asynchronous=asynchronous)

    def until_return():
        start = peers.clock()
        saving = save(asynchronous=True)
        seconds = peers.clock() - start
        saving.wait()
        return seconds

    def read(verify):
        with open_checkpoint(path, verify=verify) as c:
            c.read("master", targets)

    def check():
        read(True)
        if not all(torch.equal(t, whole) for (_, t), (_, whole) in zip(targets, entries)):
            raise ValueError("loaded values differ")

    save()
    check()
    return {
        "save moekit +fsync, checksums": save,
        "save moekit, asynchronous, until it returns": until_return,
        "load moekit, every block checked": lambda: read(True),
        "load moekit, unchecked": lambda: read(False),
    }
