"""The process in which torch elastic starts and supervises the ranks (see supervisor.py for who watches whom)."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from .folder import read_json, write_json
from .processes import adopt_orphans, python_command, watch_parent


def main() -> None:
    """Entry of the agent process: ``<folder> <process id of the supervisor>``."""
    folder = Path(sys.argv[1])
    adopt_orphans()
    threading.Thread(target=watch_parent, args=(int(sys.argv[2]),), daemon=True).start()
    code = launch(folder, read_json(folder / "config.json") or {})
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # freeing torch's modules takes half a second, in which the job would not be done


def launch(folder: Path, config: dict[str, Any]) -> int:
    """Runs all ranks to their end; how they died goes to ``ranks/agent.json``. Returns the exit code."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    endpoint = f"127.0.0.1:{config['port'] or 0}"  # 0: the store binds whatever is free and keeps it
    elastic = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=config["nproc"], run_id=config["run_id"], role="rank",
        rdzv_backend="c10d", rdzv_endpoint=endpoint, local_addr="127.0.0.1", max_restarts=0, monitor_interval=0.1,
        start_method="spawn", logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs" / "elastic")),
    )  # fmt: skip
    command = python_command("worker", str(folder), str(os.getpid()))
    report: dict[str, Any] = {"failures": {}, "error": ""}
    try:
        elastic_launch(elastic, command[0])(*command[1:])
        return 0
    except ChildFailedError as error:
        report["failures"] = {
            rank: {"exit_code": failure.exitcode, "time": float(failure.timestamp)}
            for rank, failure in error.failures.items()
        }
    except SignalException as error:
        report["error"] = f"the launching process got {error.sigval.name}"
    except Exception as error:  # noqa: BLE001  reported, whatever it is
        traceback.print_exc()
        report["error"] = f"torch elastic could not launch the ranks: {type(error).__name__}: {error}"
    finally:
        write_json(folder / "ranks" / "agent.json", report)
    return 1
