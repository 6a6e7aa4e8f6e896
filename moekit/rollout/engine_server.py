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
from .engine import Answer, Sampling
from .reward_worker import die_with, say
from .shared_ring import SharedRing
from .weight_transfer import load

BEAT = 0.5  # seconds between signs of life while a request is served


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
        data = bytearray(stream.read(n))
        if len(data) < n:
            raise EOFError
        return data

    head = json.loads(read(int.from_bytes(read(8), "little")))
    tensors = {}
    for name, kind, shape in head.pop("tensors"):
        dtype = getattr(torch, kind)
        size = dtype.itemsize * torch.Size(shape).numel()
        tensors[name] = (
            torch.frombuffer(read(size), dtype=dtype).view(shape) if size else torch.empty(shape, dtype=dtype)
        )
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
    asked: queue.SimpleQueue = queue.SimpleQueue()
    one, busy, rings = threading.Lock(), threading.Event(), list[SharedRing]()

    def listen() -> None:
        try:
            while True:
                asked.put(take(stream))
        except (EOFError, OSError):
            os._exit(0)

    def tell(head: dict[str, Any], tensors: Mapping[str, Tensor | None] | None = None) -> None:
        with one:
            put(line, {**head, "number": number}, tensors)

    def beat() -> None:
        while busy.wait():
            time.sleep(BEAT)
            done = engine.stats.steps + engine.stats.prompts_read
            tell({"beat": done if generating else time.monotonic()})

    def answer(prompt: int, sample: int, a: Answer, experts: Tensor | None) -> None:
        told = {"ids": torch.tensor(a.ids, dtype=torch.int64), "logprobs": a.logprobs, "version": a.version}
        tell({"prompt": prompt, "sample": sample, "finish": a.finish},
             told | {"experts": a.experts, "prompt_experts": experts})  # fmt: skip

    def serve(op: str, r: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        if op == "generate":
            seen = set()
            for f in engine.stream(
                r["prompts"], Sampling.from_dict(r["sampling"]), prompt_ids=r["ids"], limits=r["limits"]
            ):
                answer(f.prompt, f.sample, f.answer, None if f.prompt in seen else f.prompt_experts)
                seen.add(f.prompt)
        elif op == "score":
            found = engine.score(r["prompts"], r["answers"], Sampling.from_dict(r["sampling"]))
            for p, rollout in enumerate(found):
                for s, a in enumerate(rollout.answers):
                    answer(p, s, a, None if s else rollout.prompt_experts)
        elif op == "ring":
            rings[:] = [SharedRing.open(socket.socket(fileno=socket.recv_fds(lines, 1, 1)[1][0]), timeout=r["timeout"])]
        elif op == "update":
            sent = load(engine, r["version"], r["mode"], rings[0])
            return {"bytes": sent.bytes, "seconds": sent.seconds}, {}
        elif op == "metrics":
            return {"metrics": engine.metrics()}, {}
        stats = {n: v for n, v in vars(engine.stats).items() if isinstance(v, int | float)}
        counts = {name: m.buffer.clone() for (_, name), m in engine.counter.measures.items() if m.buffer.any()}
        engine.counter.reset()
        return {"stats": stats}, counts

    generating, number = False, 0
    for target in (listen, beat):
        threading.Thread(target=target, daemon=True).start()
    tell({"done": True})
    while True:
        request, _ = asked.get()
        generating, number = request["op"] == "generate", request["number"]
        busy.set()
        try:
            head, tensors = serve(request["op"], request)
            told: dict[str, Any] = {"done": True, "version": engine.version, **head}
        except Exception as problem:  # noqa: BLE001 (whatever it is, the owner says it)
            kind = type(problem).__name__ if isinstance(problem, MoekitError) else "EngineError"
            told, tensors = {"error": kind, "message": str(problem) if kind != "EngineError" else say(problem)}, {}
            if request["op"] == "update":
                rings.clear()
        busy.clear()
        tell(told, tensors)


if __name__ == "__main__":
    die_with(int(sys.argv[3]))
    main(*(socket.socket(fileno=int(fd)) for fd in sys.argv[1:3]))
