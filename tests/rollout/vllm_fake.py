"""A server that speaks as vLLM does in `vllm_traffic.json` and computes with the embedded engine: for tests of what a
recipe does with a server, which ends and comes back as the test wants. What vLLM itself does is tested in tests/vllm.
"""

from __future__ import annotations

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from moekit.checkpoint.export import choose_family
from moekit.checkpoint.huggingface import load_into
from moekit.checkpoint.names import pieces
from moekit.config import ModelConfig
from moekit.model.transformer import Transformer
from moekit.rollout.embedded import EmbeddedEngine
from moekit.rollout.engine import Sampling
from moekit.rollout.vllm_plugin import TORN

TELLS = "EngineCore encountered an issue. See stack trace (above) for the root cause."
DEAD = {"error": {"message": TELLS, "type": "InternalServerError", "param": None, "code": 500}}  # vLLM 0.32's words


class Fake:
    """A server on a folder's weights. `stop_after`: requests for tokens, after which it ends, with those under way;
    `lingers`: seconds for which it answers 500 after that, as one whose engine process has ended before it."""

    def __init__(
        self, shape: ModelConfig, folder: Path, port: int = 0, stop_after: int | None = None, lingers: float = 0.0
    ):
        self.model, self.lock, self.lines = Transformer(shape, seed=None), threading.Lock(), set[socket.socket]()
        load_into(self.model, folder)
        self.names = {p.name: p for p in pieces(shape, choose_family(shape))}
        self.engine, self.label, self.torn, self.paused = (
            EmbeddedEngine.of(self.model, lambda: 0),
            "default",
            False,
            False,
        )
        self.seen, self.answered = list[str](), 0
        self.left, self.lingers, outer = stop_after, lingers, self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                outer.lines.add(self.connection)
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null")
                status, reply = outer.reply(self.path, body or {})
                text = json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            def handle_error(self, *_: object) -> None:  # lines that were cut
                pass

        self.server = Server(("127.0.0.1", port), Handler)
        self.port = self.server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def kill(self) -> None:
        """Nobody listens, and all lines are cut."""
        self.server.shutdown()
        self.server.server_close()
        for line in tuple(self.lines):  # another may just be added
            try:
                line.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def reply(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with self.lock:
            self.seen.append(path)
            if self.left is not None and self.left < 0 and self.lingers:
                return 500, DEAD
            if path == "/inference/v1/generate":
                if self.left is not None:
                    self.left -= 1
                    if self.left == -1 and self.lingers:
                        threading.Timer(self.lingers, self.kill).start()
                        return 500, DEAD
                    if self.left < 0:
                        if self.left == -1:
                            self.kill()
                        raise ConnectionError
                assert not self.torn, "sampled from half an update: this ends vLLM"
                self.answered += 1
                return 200, self.answer(**body)
            return self.control(path.partition("?")[0], body)

    def answer(self, token_ids: list[int], sampling_params: dict[str, Any]) -> dict[str, Any]:
        how, told = sampling_params, None
        sampling = Sampling(
            max_new_tokens=how["max_tokens"], temperature=how["temperature"], seed=how["seed"],
            top_k=how.get("top_k", 0), top_p=how.get("top_p", 1.0), stop_ids=tuple(how.get("stop_token_ids", ())),
        )  # fmt: skip
        if "prompt_logprobs" in how:
            given = self.engine.score([token_ids[:1]], [[token_ids[1:]]], Sampling())[0].answers[0].logprobs.tolist()
            told = [None, *({str(t): {"logprob": x}} for t, x in zip(token_ids[1:], given))]
        (rollout,) = self.engine.generate([token_ids], sampling)
        (a,) = rollout.answers
        content = [{"token_id": t, "logprob": x} for t, x in zip(a.ids, a.logprobs.tolist())]
        spans = [{"version": self.label, "start": 0, "end": len(a.ids)}]
        choice = {
            "token_ids": a.ids,
            "finish_reason": a.finish,
            "logprobs": {"content": content},
            "routed_experts": None,
        }
        return {"choices": [choice | {"weight_versions": spans}], "prompt_logprobs": told}

    def control(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        own = dict(self.model.named_parameters())
        if path == "/is_paused":
            return 200, {"is_paused": self.paused}
        if path == "/weight_info":
            return 200, {"weight_version": self.label}
        if path in ("/pause", "/resume"):
            self.paused = path == "/pause"
        if path == "/init_weight_transfer_engine":
            if body["init_info"].get("ask") and self.torn:
                return 500, {"error": TORN}
            self.root = Path(body["init_info"]["root"])
        if path == "/start_weight_update":
            self.torn = True
        if path == "/update_weights":
            if body["update_info"].get("abandon"):
                return 500, {"error": "the sender gave up"}
            with torch.no_grad():
                for name, t in load_file(self.root / body["update_info"]["file"]).items():
                    p = self.names[name]
                    own[p.parameter].view(-1)[p.start : p.stop] = t.view(-1)
        if path == "/finish_weight_update":
            self.torn, self.label = False, body["weight_version"]
        return 200, {"success": True}
