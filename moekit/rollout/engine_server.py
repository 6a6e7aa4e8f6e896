"""What an engine process runs: an `EmbeddedEngine`, requests over a socket, weights through a ring in shared memory.

`EngineProcess` starts it as a module, with a new interpreter. It ends when the line to its owner closes, whatever it is
doing, and with the thread that started it.

A message is a JSON head and the bytes of its tensors (`put`, `take`); nothing is unpickled.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, BinaryIO

import torch
from torch import Tensor

from .. import ops
from ..config import ModelConfig
from ..errors import MoekitError
from .embedded import EmbeddedEngine
from .engine import Sampling
from .reward_worker import die_with, say
from .shared_ring import SharedRing
from .weight_transfer import load

BEAT = 0.5  # seconds between signs of life


def put(line: socket.socket, head: Mapping[str, Any], tensors: Mapping[str, Tensor | None] | None = None) -> None:
    """Send a message; tensors that are None are left out."""
    some = {n: t.detach().cpu().contiguous() for n, t in (tensors or {}).items() if t is not None}
    shapes = [[n, str(t.dtype).removeprefix("torch."), list(t.shape)] for n, t in some.items()]
    text = json.dumps({**head, "tensors": shapes}).encode()
    parts = [t.reshape(-1).view(torch.uint8).numpy().tobytes() for t in some.values()]
    line.sendall(b"".join([len(text).to_bytes(8, "little"), text, *parts]))


def take(stream: BinaryIO) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The next message. Raises EOFError: the other end is gone."""

    def read(n: int) -> bytearray:
        if len(data := bytearray(stream.read(n))) < n:
            raise EOFError
        return data

    head, tensors = json.loads(read(int.from_bytes(read(8), "little"))), {}
    for name, kind, shape in head.pop("tensors"):
        out = tensors[name] = torch.empty(shape, dtype=getattr(torch, kind))
        if out.numel():
            out.view(-1).copy_(torch.frombuffer(read(out.nbytes), dtype=out.dtype))
    return head, tensors


def main(line: socket.socket, lines: socket.socket) -> None:
    """Serve requests until the other end closes.

    Args:
        line: requests and answers.
        lines: brings the socket of each new ring.
    """
    stream = line.makefile("rb")
    hello, _ = take(stream)
    torch.set_num_threads(hello["threads"])
    ops.replay_choices(hello["choices"])
    engine = EmbeddedEngine(ModelConfig.from_dict(hello["model"]), **hello["how"])
    asked: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    one, ring = threading.Lock(), list[SharedRing]()
    r: dict[str, Any] = {"number": 0, "op": "wait"}  # the request that is served

    def listen() -> None:
        try:
            while True:
                asked.put(take(stream)[0])
        except (EOFError, OSError):
            os._exit(0)

    def tell(head: dict[str, Any], tensors: Mapping[str, Tensor | None] | None = None) -> None:
        with one:
            put(line, {**head, "number": r["number"]}, tensors)

    def beat() -> None:
        while True:
            time.sleep(BEAT)
            if r["op"] != "wait":
                tell({"beat": engine.stats.steps + engine.stats.prompts_read if r["op"] == "generate" else time.time()})

    def serve() -> tuple[dict[str, Any], dict[str, Tensor]]:
        if r["op"] == "update":
            if r["new"]:
                fd = socket.recv_fds(lines, 1, 1)[1][0]
                ring[:] = [SharedRing.open(socket.socket(fileno=fd), timeout=r["timeout"])]
            return {"seconds": load(engine, r["version"], r["mode"], *ring).seconds}, {}
        if r["op"] == "metrics":
            return {"metrics": engine.metrics()}, {}
        how, seen = Sampling.from_dict(r["sampling"]), set[int]()
        if r["op"] == "generate":
            stream = engine.stream(r["prompts"], how, prompt_ids=r["prompt_ids"], limits=r["limits"])
            found = ((f.prompt, f.sample, f.answer, f.prompt_experts) for f in stream)
        else:
            scored = enumerate(engine.score(r["prompts"], r["answers"], how))
            found = ((i, s, a, x.prompt_experts) for i, x in scored for s, a in enumerate(x.answers))
        for i, sample, a, experts in found:
            told = {"ids": torch.tensor(a.ids, dtype=torch.int64), "logprobs": a.logprobs, "version": a.version}
            told |= {"experts": a.experts, "prompt_experts": None if i in seen else experts}
            tell({"prompt": i, "sample": sample, "finish": a.finish}, told)
            seen.add(i)
        counts = {name: m.buffer.clone() for (_, name), m in engine.counter.measures.items() if m.buffer.any()}
        engine.counter.reset()
        return {"stats": {n: v for n, v in vars(engine.stats).items() if isinstance(v, int | float)}}, counts

    for target in (listen, beat):
        threading.Thread(target=target, daemon=True).start()
    tell({"done": True})
    while True:
        r["op"] = "wait"
        r = asked.get()
        try:
            head, tensors = serve()
            told: dict[str, Any] = {"done": True, **head}
        except Exception as problem:  # noqa: BLE001 (whatever it is, the owner says it)
            own = isinstance(problem, MoekitError)
            told = {"error": type(problem).__name__ if own else "EngineError"}
            told, tensors = told | {"message": str(problem) if own else say(problem)}, {}
        tell(told, tensors)


if __name__ == "__main__":
    die_with(int(sys.argv[3]))
    main(*(socket.socket(fileno=int(fd)) for fd in sys.argv[1:3]))
