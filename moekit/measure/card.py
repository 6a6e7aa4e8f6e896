"""The run card: what somebody must know to compare this run with another one.

Section 22.4 of the source asks a comparison to state base checkpoint, learner configuration, batch construction and
token accounting. The card adds denominators, versions, hardware, allocator and threads, source state, time and final
losses. It is written when a run starts, and again, with the results, when it ends."""

import dataclasses
import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..data.batch import CLASSES
from ..errors import CheckpointError, RunError
from .cost import CONVENTION
from .machine import environment

if TYPE_CHECKING:
    import pandas as pd

FORMAT = 1
DEFINITIONS = {
    "supervised": "positions that have a label",
    "context": "real positions without a label: masked prompts, and the last token of a document",
    "filtered": "positions of instances that the instance filter removed; they still route",
    "padding": "positions of no document",
    "routed row": "one (position, chosen expert) pair; a dispatched row entered an expert's matmul",
    "identity": "positions x top_k = dispatched + dropped + elided, in every layer and pass",
    "flops": CONVENTION,
}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class RunCard:
    """One run's card. Fields are plain dictionaries of JSON values, so that a new fact needs no new version.
    >>> card = RunCard("demo", base={"preset": "tiny", "seed": 0}, objective={"name": "sft"}, environment={})
    >>> RunCard.from_dict(json.loads(card.to_json())) == card
    True
    """

    name: str
    base: dict[str, Any] = field(default_factory=dict)  # base checkpoint: see `base_checkpoint`
    model: dict[str, Any] = field(default_factory=dict)  # ModelConfig, parameter counts
    objective: dict[str, Any] = field(default_factory=dict)  # name, denominator, constant_length
    learner: dict[str, Any] = field(default_factory=dict)  # LearnerConfig
    layout: dict[str, Any] = field(default_factory=dict)  # world, dp, microbatches, threads of a rank
    batch: dict[str, Any] = field(default_factory=dict)  # data, DataConfig, rows of a step and of a microbatch, report
    accounting: dict[str, Any] = field(default_factory=dict)  # see `token_accounting`
    results: dict[str, Any] = field(default_factory=dict)  # losses, scores
    environment: dict[str, Any] = field(default_factory=environment)
    definitions: dict[str, Any] = field(default_factory=lambda: dict(DEFINITIONS))
    started: str = field(default_factory=_now)  # ISO 8601, UTC
    ended: str | None = None
    seconds: float | None = None
    format: int = FORMAT

    def finish(self, metrics: "pd.DataFrame", **results: Any) -> "RunCard":
        """The card at the run's end: accounting and losses from its metrics, time, and other results."""
        ended = _now()
        seconds = (datetime.fromisoformat(ended) - datetime.fromisoformat(self.started)).total_seconds()
        results = {"losses": losses(metrics), **results}
        accounting = token_accounting(metrics)
        return dataclasses.replace(self, accounting=accounting, results=results, ended=ended, seconds=seconds)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: tuples and paths become lists and text, non-finite numbers the text "nan", "inf", "-inf"."""
        return {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RunCard":
        """Inverse of `to_dict`. Raises `RunError` for a card of another format."""
        if values.get("format") != FORMAT or "name" not in values:
            raise RunError(f"not a run card of format {FORMAT}: format={values.get('format')!r}; update moekit")
        known = {f.name for f in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})

    def to_json(self) -> str:
        """Strict JSON."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    def to_html(self) -> str:
        """A small page that needs nothing else: no script, no outside file."""
        return self._page(whole=True, closed=["Environment", "Definitions"])

    def _repr_html_(self) -> str:  # in a notebook: what came out is open, the rest a click away
        return self._page(whole=False, closed=[title for title, _ in self._sections()[2:]])

    def _page(self, **how: Any) -> str:
        from jinja2 import Template

        template = Template(Path(__file__).with_name("card.html.jinja").read_text(), autoescape=True)
        return template.render(name=self.name, sections=self._sections(), text=_show, **how)

    def __repr__(self) -> str:
        lines = [f"Run card: {self.name}"]
        for title, values in self._sections():
            lines += ["", title, *_text(values, 2)]
        return "\n".join(lines)

    def _sections(self) -> list[tuple[str, Any]]:
        d = self.to_dict()
        when = {k: d[k] for k in ("started", "ended", "seconds") if d[k] is not None}
        titles = {
            "results": "Results", "accounting": "Token accounting", "base": "Base checkpoint",
            "objective": "Objective and denominator", "learner": "Learner", "layout": "Layout",
            "batch": "Batch construction", "model": "Model", "environment": "Environment", "definitions": "Definitions",
        }  # fmt: skip
        sections = [(title, d[name]) for name, title in titles.items() if d[name]]
        return [*sections[:2], ("Time", when), *sections[2:]]


def hash_folder(path: str | Path) -> str:
    """SHA-256 (hexadecimal) of a model folder's content: its config.json and all of its safetensors files.

    Files are hashed one by one, in threads, and their names and digests in the order of names. The same weights cut
    into other shards have another hash. Cost: reads the folder once.
    Raises CheckpointError: no such folder, or no safetensors file in it."""
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"there is no model folder {folder}")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} holds no .safetensors file, so there are no weights to hash")
    return _hash([*folder.glob("config.json"), *files])


def hash_data(path: str | Path) -> str:
    """SHA-256 (hexadecimal) of a data file, or of all files of a data folder. Cost: reads them once, far quicker than
    they are tokenized."""
    files = [Path(path)] if Path(path).is_file() else sorted(f for f in Path(path).rglob("*") if f.is_file())
    return _hash(files, named=len(files) > 1)


def _hash(files: list[Path], named: bool = True) -> str:
    """Of the names and contents of files, in their order; read in threads."""

    def digest(file: Path) -> str:
        with open(file, "rb") as f:
            return f"{file.name if named else ''}\0{hashlib.file_digest(f, 'sha256').hexdigest()}\n"

    with ThreadPoolExecutor(4) as pool:
        return hashlib.sha256("".join(pool.map(digest, files)).encode()).hexdigest()


def base_checkpoint(path_or_preset: str | Path, **facts: Any) -> dict[str, Any]:
    """What the card says of the start: a folder and its content hash, or a preset (give its seed)."""
    folder = Path(path_or_preset)
    if folder.is_dir():
        return {"path": str(path_or_preset), "sha256": hash_folder(folder), **facts}
    return {"preset": str(path_or_preset), "weights": "drawn at random", **facts}


def token_accounting(metrics: "pd.DataFrame") -> dict[str, Any]:
    """A run's totals from its metrics: positions and rows by class, seconds, rates over the run, rows per supervised
    token. Sums over the recorded steps, so a resumed run counts every step once."""
    column: Any = lambda name: metrics[name].dropna().to_numpy()
    total = Counter({n: int(column(n).sum()) for n in metrics.columns if n.startswith(("tokens/", "rows/"))})
    of_class = {c: total[f"tokens/{c}"] for c in CLASSES}
    positions, supervised, dispatched = sum(of_class.values()), total["tokens/supervised"], total["rows/dispatched"]
    per = lambda n: n / supervised if supervised else 0.0
    out: dict[str, Any] = {
        "steps": len(metrics),
        "positions": {**of_class, "total": positions},
        "routed rows": {n.partition("/")[2]: v for n, v in total.items() if n.startswith("rows/")},
        "per supervised token": {
            "positions": per(positions),
            "rows dispatched": per(dispatched),
            **{f"rows of {c} positions": per(total[f"rows/{c}"]) for c in CLASSES},
        },
    }
    if "time/step_s" in metrics:
        seconds = out["seconds in steps"] = float(column("time/step_s").sum())
        of_rate = {"supervised tokens/s": supervised, "tokens/s": positions - total["tokens/padding"],
                   "positions/s": positions, "routed rows/s": dispatched}  # fmt: skip
        out["rates over the run"] = {name: n / seconds if seconds > 0 else 0.0 for name, n in of_rate.items()}
    if "step/skipped" in metrics and len(skipped := column("step/skipped")):
        out["skipped steps"] = int(skipped.max())
    return out


def losses(metrics: "pd.DataFrame") -> dict[str, dict[str, float]]:
    """First, last and smallest value of every loss/... and eval/... metric, and how often it was not finite.

    A learner's record (one with `step/index`) has every loss, so that a missing loss there is a NaN."""
    out = {}
    learners = np.asarray(metrics["step/index"].notna()) if "step/index" in metrics else None
    for name in (n for n in metrics.columns if n.startswith(("loss/", "eval/"))):
        column = np.asarray(metrics[name], dtype=float)
        seen = column[learners if name.startswith("loss/") and learners is not None else ~np.isnan(column)]
        finite = seen[np.isfinite(seen)]
        if len(seen):
            out[name] = {"first": float(seen[0]), "last": float(seen[-1]),
                         "smallest": float(finite.min()) if len(finite) else math.nan,
                         "not finite": len(seen) - len(finite)}  # fmt: skip
    return out


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if hasattr(value, "item") and not isinstance(value, (str, bytes)):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _show(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, int | float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.6g}"
    if isinstance(value, list):
        return ", ".join(map(_show, value)) or "none"
    return str(value)


def _text(value: Any, indent: int) -> list[str]:
    lines = []
    for name, v in value.items():
        if isinstance(v, dict):
            lines += [f"{' ' * indent}{name}", *_text(v, indent + 2)]
        else:
            shown = _show(v).replace("\n", "\n" + " " * (indent + 31))
            lines.append(f"{' ' * indent}{name:<30} {shown}")
    return lines
