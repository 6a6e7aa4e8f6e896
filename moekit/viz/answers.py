"""Answers as coloured tokens: how likely each was when it was sampled, and which experts read it."""

from dataclasses import dataclass
from math import exp
from typing import Any, NamedTuple

from .show import _decoder
from .theme import page

MEANING = "The darker a token, the less likely it was when it was sampled; hover for log-prob and experts."


class Drawn(NamedTuple):
    """One answer: what there is to say about it, and its tokens (text, probability, words)."""

    facts: str
    tokens: tuple[tuple[str, float, str], ...]


@dataclass(frozen=True)
class Answers:
    """Answers to one prompt: HTML in a notebook, text elsewhere; `rollout` holds ids, log-probs, experts, versions."""

    rollout: Any  # moekit.rollout.engine.Rollout
    texts: tuple[str, ...]
    prompt: str
    drawn: tuple[Drawn, ...]

    def __repr__(self) -> str:
        lines = [self.prompt]
        for answer, text in zip(self.drawn, self.texts):
            lines += [f"--- {answer.facts}", text]
            lines += [f"  {t.strip()!r:<14}{words}" for t, _, words in answer.tokens]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return page("answers.html.jinja", shown=self, meaning=MEANING)


def draw_answers(rollout: Any, tokenizer: Any = None) -> Answers:
    """Draw what an engine sampled.

    Args:
        rollout: a `moekit.rollout.engine.Rollout`.
        tokenizer: as for `moekit.show`; None = ids are drawn.
    """
    text, drawn = _decoder(tokenizer), []
    whole = lambda ids: "".join(text(i) for i in ids) if tokenizer is None else tokenizer.decode(ids)
    for number, a in enumerate(rollout.answers):
        tokens = []
        for j, (i, logprob) in enumerate(zip(a.ids, a.logprobs.tolist())):
            layers = [] if a.experts is None else a.experts[j].tolist()
            read = " | ".join(" ".join(map(str, ks)) for ks in layers) if layers and layers[0][0] >= 0 else "not read"
            words = f"id {i}, log-prob {logprob:.3f}, version {int(a.version[j])}, experts {read}"
            tokens.append((text(i), exp(logprob), words))
        facts = f"answer {number}: {len(a.ids)} tokens, {a.finish}, log-prob {float(a.logprobs.sum()):.3f}"
        drawn.append(Drawn(facts, tuple(tokens)))
    return Answers(rollout, tuple(whole(a.ids) for a in rollout.answers), whole(rollout.prompt), tuple(drawn))
