"""Steps of reinforcement learning: where their time goes, and how a score becomes advantages, token by token.

Axis letters: A answers, T tokens of the longest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import DataError
from .series import columns
from .theme import DIVERGING, SERIES, WIDE, Figure, end_labels, figure, names_axis, note

PARTS = {"rollout": "rollout", "reward": "reward", "score": "old log-probs", "reference": "reference",
         "critic_score": "critic, values", "critic_train": "critic, training", "train": "policy, training",
         "transfer": "weight transfer"}  # fmt: skip


def step_parts(source: Any) -> Figure:
    """Seconds of every step, stacked by what they were spent on.

    Args: `source`: a Run, a run folder, a table or dictionary of columns with time/<part>_s of GRPO or PPO.
    Raises DataError: no such column.
    """
    found = {words: v for name, words in PARTS.items() if (v := columns(source).get(f"time/{name}_s")) is not None}
    if not found:
        raise DataError("no part of a step was timed (time/rollout_s, ...); give a GRPO or PPO run")
    ms = {words: 1e3 * np.nan_to_num(v) for words, v in found.items()}
    whole, labels, level = sum(map(np.sum, ms.values())), [], 0.0
    fig = figure("Where a step's time goes", "Each bar is a step", barmode="stack", bargap=0.12, margin={"r": 190})
    top = 1.04 * float(np.sum(list(ms.values()), 0).max())
    for (words, v), colour in zip(ms.items(), (*SERIES, "#B5495B", "#8A8D00")):
        fig.add_bar(x=list(range(len(v))), y=v.tolist(), name=words, marker={"color": colour}, hovertemplate="%{y:.3g}")
        labels.append((level + v[-1] / 2, f"{words} {100 * v.sum() / whole:.0f} %", colour))
        level += float(v[-1])
    fig.update_yaxes(title="ms", range=[0, top])
    fig.update_xaxes(title="step", range=[-0.6, len(next(iter(ms.values()))) - 0.4])
    end_labels(fig, labels, 0.0, top)
    return fig


def token_values(names: Sequence[str], tokens: Sequence[Sequence[str]], panels: Mapping[str, Sequence[Any]],
                 subtitle: str = "") -> Figure:  # fmt: skip
    """Numbers of every token of a few answers, one panel a quantity, the token written in its cell.

    Args:
        names: of the answers, A.
        tokens: of each answer.
        panels: quantity -> one sequence of numbers for each answer, as long as its tokens.
    Raises DataError: lengths differ.
    """
    if any(
        len(row) != len(own) or len(rows) != len(tokens) for rows in panels.values() for row, own in zip(rows, tokens)
    ):
        raise DataError("token_values: every quantity needs a number for every token of every answer")
    longest, wide = max(map(len, tokens)), 1 / len(panels)
    fig = figure("Token by token", subtitle, width=WIDE, height=150 + 30 * len(names), hovermode="closest",
                 margin={"l": 30 + 7 * max(map(len, names)), "t": 116, "b": 46})  # fmt: skip
    pad = lambda row, empty: [*row, *[empty] * (longest - len(row))]
    for at, (what, rows) in enumerate(panels.items()):
        suffix, left = str(at + 1) if at else "", at * wide
        z_AT = [pad([float(v) for v in row], None) for row in rows]
        reach = max((abs(v) for row in z_AT for v in row if v is not None), default=1.0) or 1.0
        fig.add_heatmap(z=z_AT, x=list(range(longest)), y=list(names), text=[pad(row, "") for row in tokens],
                        texttemplate="%{text}", textfont={"size": 11}, zmin=-reach, zmax=reach, colorscale=DIVERGING,
                        xgap=1, ygap=1, showscale=False, hovertemplate="%{text}: %{z:.3g}", name=what,
                        xaxis=f"x{suffix}", yaxis=f"y{suffix}")  # fmt: skip
        x = {"domain": [left, left + wide - 0.03], "anchor": f"y{suffix}", "showline": False, "title": "token"}
        y = {**names_axis(names), "anchor": f"x{suffix}", "showticklabels": at == 0}
        fig.update_layout({f"xaxis{suffix}": x, f"yaxis{suffix}": y})
        note(fig, f"<b>{what}</b>, ±{reach:.2g}", left, 1, stand="left bottom", shift=(0, 8))
    return fig
