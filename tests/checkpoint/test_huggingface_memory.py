"""Loading and exporting 500 MB take little more memory than the model: measured from outside Python's own counters."""

from __future__ import annotations

import json
import subprocess
import sys

MB = 1024 * 1024

# Anonymous resident memory is what a process holds for itself. Pages of a mapped file are not in it: the kernel can
# drop them at any time. A thread samples it every half millisecond while torch's copies run without the GIL.
SCRIPT = """
import ctypes, gc, json, sys, threading, time
import torch
from moekit.config import ModelConfig
from moekit.learner.weights import export, load
from moekit.model.transformer import Transformer

torch.set_num_threads(1)

def anonymous():
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("RssAnon"))

def peak_during(work):
    peak, done, samples = [anonymous()], threading.Event(), [0]
    def sample():
        while not done.is_set():
            peak[0] = max(peak[0], anonymous())
            samples[0] += 1
            time.sleep(0.0005)
    thread = threading.Thread(target=sample)
    thread.start()
    result = work()
    done.set()
    thread.join()
    return result, max(peak[0], anonymous()), samples[0]

folder = sys.argv[1]
# a fused gate_up of 151 MB: a copy of one such tensor would already be too much
config = ModelConfig(vocab=8192, width=1024, layers=2, heads=8, experts=16, top_k=2, expert_width=1152,
                     qk_norm="full", family="olmoe")
model = Transformer(config, seed=None)
for p in model.parameters():
    p.data.fill_(0.01)

def export_it():
    export(model, folder, naming="fused", max_shard_bytes=10**8)
    return model

told = {}
for name, work in {
    "export": export_it,
    "float32": lambda: load(folder),
    "bfloat16": lambda: load(folder, dtype="bfloat16"),
}.items():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # pages freed by the last round must not serve this one uncounted
    before = anonymous()
    made, peak, samples = peak_during(work)
    held = sum(p.numel() * p.element_size() for p in made.parameters())
    told[name] = {"held": held, "grown": peak - before, "samples": samples}
    del made
    model = None
print(json.dumps(told))
"""


def test_extra_memory_of_export_and_load(tmp_path):
    folder = tmp_path / "model"
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder)], capture_output=True, text=True, timeout=200, check=False
    )
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout)
    files = list(folder.glob("*.safetensors"))
    assert sum(f.stat().st_size for f in files) >= 500 * MB
    assert len(files) > 3
    assert all(part["samples"] > 20 for part in told.values())
    # shards are written from the parameters themselves since safetensors 0.8, older versions copy one shard
    assert told["export"]["grown"] < max(f.stat().st_size for f in files) + 16 * MB
    for dtype, share in (("float32", 1), ("bfloat16", 2)):
        held, grown = told[dtype]["held"], told[dtype]["grown"]
        assert held == told["export"]["held"] // share
        extra = grown - held
        print(f"as {dtype}: holds {held / MB:.0f} MB, extra {extra / MB:.1f} MB")
        assert -0.2 * held < extra < 0.2 * held  # far below zero would mean that nothing was measured
