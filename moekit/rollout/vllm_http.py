"""Ways to reach vLLM: a server over HTTP, started here or elsewhere, and a `vllm.LLM` in this process.

The server's routes for weights are for whoever reaches its port: it is bound to this host, and should stay there.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from ..errors import EngineError
from .vllm_messages import Request
from .vllm_plugin import BACKEND

ROUTES = {
    "init": "/init_weight_transfer_engine", "start": "/start_weight_update", "update": "/update_weights",
    "finish": "/finish_weight_update", "reset": "/reset_prefix_cache", "resume": "/resume", "pause": "/pause",
}  # fmt: skip
HINTS = {
    403: "; start the server with --enable-scale-out",
    404: "; start the server with VLLM_SERVER_DEV_MODE=1 and a vLLM of 0.32 or newer",
}
AGAIN = "look at its log, start it again, and update the weights"
ASKED = {"version": "/weight_info", "paused": "/is_paused"}
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONSAFEPATH": "1"}

# prctl's PR_SET_PDEATHSIG, then the command
DIES = """import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


class HTTPLink:
    """A vLLM server.

    Args:
        url: as "http://127.0.0.1:8000".
        timeout: seconds that one request may take.
        connections: requests at a time.
    """

    def __init__(self, url: str, *, timeout: float = 120.0, connections: int = 32):
        self.url, self.timeout = url.rstrip("/"), timeout
        self.host, self.mine = urlsplit(self.url).netloc, threading.local()
        self.pool = ThreadPoolExecutor(connections, thread_name_prefix="vllm")

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """One request. Raises EngineError: no answer in time, or one that is no success, with what it says."""
        connection = getattr(self.mine, "connection", None)
        if connection is None:
            connection = self.mine.connection = http.client.HTTPConnection(self.host, timeout=self.timeout)
        data = None if body is None else json.dumps(body).encode()
        text, status = "", 0
        try:
            for attempt in (0, 1):  # a connection that was idle may be closed on the other side
                reused = connection.sock is not None
                try:
                    connection.request(method, path, data, {"Content-Type": "application/json"})
                    response = connection.getresponse()
                    text, status = response.read().decode(), response.status
                    break
                except (BrokenPipeError, ConnectionResetError, http.client.RemoteDisconnected):
                    connection.close()
                    if attempt or not reused:
                        raise
            found = json.loads(text) if text and status == 200 else {}
        except (OSError, http.client.HTTPException, ValueError) as error:
            connection.close()
            raise EngineError(
                f"the vLLM server {self.url} did not answer {path} ({type(error).__name__}: {error}); it has "
                f"{self.timeout:g} s for an answer (of a run: engine_seconds); {AGAIN}"
            ) from error
        if status != 200:  # a server whose engine process has ended answers so until it has ended too
            hint = HINTS.get(status, f"; if its engine has ended, {AGAIN}" if status >= 500 else "")
            raise EngineError(f"the vLLM server {self.url} answered {path} with {status}: {text[:300]}{hint}")
        return found

    def ask(self, requests: Sequence[Request], done: Callable[[int, dict[str, Any]], None]) -> None:
        """See `vllm_messages.Link`."""
        bodies = [{"token_ids": ids, "sampling_params": how} for ids, how in requests]
        work = [self.pool.submit(self.call, "POST", "/inference/v1/generate", body) for body in bodies]
        problem: EngineError | None = None
        try:
            for at, one in enumerate(work):
                try:
                    if not one.cancelled():
                        done(at, one.result())
                except EngineError as error:
                    problem = problem or error
                    for other in work:
                        other.cancel()
        finally:
            for one in work:
                one.cancel()
        if problem is not None:
            raise problem

    def control(self, what: str, **body: Any) -> dict[str, Any]:
        """See `vllm_messages.Link`."""
        if what in ASKED:
            return self.call("GET", ASKED[what])
        path = ROUTES[what] + (f"?mode={body.pop('mode')}" if "mode" in body else "")
        return self.call("POST", path, body)

    def close(self) -> None:
        """End the threads."""
        self.pool.shutdown(cancel_futures=True)


class LocalLink:
    """A `vllm.LLM` of this process; it generates for one thread at a time. Make it with `weight_transfer_config={
    "backend": "moekit_files"}`, `logprobs_mode="processed_logprobs"`, `skip_tokenizer_init=True` and
    `enable_chunked_prefill=False`."""

    def __init__(self, llm: Any):
        self.llm, self.lock, self.url = llm, threading.Lock(), "of this process"

    def ask(self, requests: Sequence[Request], done: Callable[[int, dict[str, Any]], None]) -> None:
        """See `vllm_messages.Link`; replies are shaped as those of the token endpoint."""
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

        prompts = [{"prompt_token_ids": ids} for ids, _ in requests]
        try:
            with self.lock:
                found = self.llm.generate(prompts, [SamplingParams(**how) for _, how in requests], use_tqdm=False)
        except Exception as error:
            how = "if its engine has ended, make another LLM and update the weights"
            raise EngineError(f"vLLM failed: {error}; {how}") from error
        for at, one in enumerate(found):
            done(at, self._reply(one))

    def _reply(self, found: Any) -> dict[str, Any]:
        (out,) = found.outputs
        content = [
            {"token_id": t, "logprob": at[t].logprob,
             "top_logprobs": [{"token_id": i, "logprob": x.logprob} for i, x in at.items()]}
            for t, at in zip(out.token_ids, out.logprobs or [])
        ]  # fmt: skip
        spans = [{"version": s.version, "start": s.start, "end": s.end} for s in out.weight_versions or []]
        choice = {"token_ids": list(out.token_ids), "finish_reason": out.finish_reason, "weight_versions": spans}
        choice |= {"logprobs": {"content": content}, "routed_experts": getattr(out, "routed_experts", None)}
        return {"choices": [choice], "prompt_logprobs": found.prompt_logprobs}

    def control(self, what: str, **body: Any) -> dict[str, Any]:
        """See `vllm_messages.Link`; nothing runs between calls, so there is nothing to pause."""
        if what in ("pause", "resume", "paused"):
            return {"is_paused": False}
        llm, request = self.llm, dict(body)
        calls: dict[str, Callable[[], Any]] = {
            "init": lambda: llm.init_weight_transfer_engine(request), "start": llm.start_weight_update,
            "update": lambda: llm.update_weights(request), "reset": llm.reset_prefix_cache,
            "finish": lambda: llm.finish_weight_update(**request), "version": llm.get_weight_version,
        }  # fmt: skip
        try:
            with self.lock:
                found = calls[what]()
        except Exception as error:
            raise EngineError(f"vLLM refused {what}: {error}") from error
        return {"success": found} if what == "reset" else {"weight_version": found}

    def close(self) -> None:
        """The LLM stays with who made it."""


@dataclass
class Server:
    """A vLLM server that was started here; a context manager that ends it and all its processes. On Linux it is told to
    end when this object or its process is gone, also when that is killed."""

    command: list[str]
    environment: dict[str, str]
    url: str
    log: Path
    patience: float
    process: subprocess.Popen | None = None
    shared: set[str] = field(default_factory=set)
    starter: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))  # with whose thread it ends

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start and wait until it is healthy. Raises EngineError: it ended, or took too long; with its log's end."""
        with self.log.open("ab") as log:
            how: dict[str, Any] = {"env": self.environment, "cwd": self.log.parent, "stdout": log, "stderr": log}
            command = [sys.executable, "-ISc", DIES, str(os.getpid()), *self.command]
            how |= {"stdin": subprocess.DEVNULL, "start_new_session": True}
            self.process = process = self.starter.submit(subprocess.Popen, command, **how).result()
        link, until = HTTPLink(self.url, timeout=5, connections=1), time.monotonic() + self.patience
        try:
            while True:
                time.sleep(0.25)
                if (ended := process.poll()) is not None or time.monotonic() > until:
                    raise EngineError(f"vLLM did not start (exit {ended}): ...{self.log.read_text()[-1500:]}")
                with suppress(EngineError):
                    link.call("GET", "/health")
                    self.shared = _shared(process.pid)
                    return
        except BaseException:
            self.stop()
            raise
        finally:
            link.close()

    def stop(self) -> None:
        """End every process of it: they share a session."""
        if self.process is None:
            return
        process, self.process = self.process, None
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                if group_alive(process):
                    os.killpg(process.pid, number)
            until = time.monotonic() + 10.0
            while group_alive(process) and time.monotonic() < until:
                time.sleep(0.05)
        while self.shared:  # what those that were killed left
            Path(self.shared.pop()).unlink(missing_ok=True)

    def restart(self) -> None:
        """A new server, with the weights of its folder: update them before anything is sampled."""
        self.stop()
        self.start()

    def link(self, **how: Any) -> HTTPLink:
        """How to reach it."""
        return HTTPLink(self.url, **how)


def _shared(group: int) -> set[str]:
    """Shared memory and semaphores of a server's processes, where /proc tells: whoever is killed leaves them there."""
    found = set[str]()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            if os.getpgid(int(maps.parent.name)) == group:
                found |= {*re.findall(r"/dev/shm/(?:psm_|sem\.mp-)\w+$", maps.read_text(), re.MULTILINE)}
    return found


def group_alive(process: subprocess.Popen) -> bool:
    """Whether a process of its session is left."""
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def start_server(
    model: str | Path, *, python: str = sys.executable, dtype: str = "float32", max_length: int = 512,
    port: int | None = None, log: str | Path | None = None, patience: float = 300.0, flags: Sequence[str] = (),
    environment: dict[str, str] | None = None,
) -> Server:  # fmt: skip
    """Start vLLM's server on a Hugging Face folder, on this host, and wait for it.

    Args:
        model: the folder; no tokenizer is needed.
        python: the interpreter of an environment with vLLM and moekit in it.
        dtype, max_length: of serving.
        port: None = one that is free.
        log: file; None = one in a new folder.
        patience: seconds until it must be healthy.
        flags, environment: more of them, as `("--enable-return-routed-experts",)`.

    Raises EngineError: it did not start; with the end of its log.
    """
    if port is None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
    command = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(Path(model).resolve()),
        "--host", "127.0.0.1", "--port", str(port), "--dtype", dtype, "--enforce-eager",
        "--max-model-len", str(max_length),
        "--no-enable-chunked-prefill",  # on a CPU vLLM 0.32 ends when it splits the prompt of a request with a seed
        "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1", "--enable-scale-out", "--skip-tokenizer-init",
        "--generation-config", "vllm", "--weight-transfer-config", json.dumps({"backend": BACKEND}), *flags,
    ]  # fmt: skip
    path = Path(tempfile.mkdtemp(prefix="vllm-")) / "server.log" if log is None else Path(log).resolve()
    whole = {"VLLM_CPU_KVCACHE_SPACE": "1", **os.environ, **ENVIRONMENT, **(environment or {})}
    server = Server(command, whole, f"http://127.0.0.1:{port}", path, patience)
    server.start()
    return server
