"""How many families (pairs, groups) one microbatch holds: from their combined lengths, and a budget of tokens or bytes.

A pretraining microbatch is a number of rows. A family has several answers, so the same number of families is several
times as many positions, and memory goes with positions. Sizes are positions as `moekit.data.families` lays them out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import ConfigError, DataError
from .families import family_size
from .pack import best_fit_decreasing

Lengths = tuple[int, Sequence[int]]  # tokens of a prompt, and of each of its answers


@dataclass(frozen=True)
class Budget:
    """What one microbatch holds. `str(budget)` explains it."""

    positions: int  # of a microbatch; whole rows where rows have a fixed length
    families: int  # that fit whichever they are: each as large as the largest
    sizes: tuple[int, ...]  # positions of each family given
    overflow: float  # positions of as many families as a pretraining microbatch has rows, over the budget
    microbatches: list[list[int]]  # the families given, by their places; each microbatch fits (see `cut`)
    text: str

    def __str__(self) -> str:
        return self.text


def derive(
    families: Sequence[Lengths], *, tokens: int | None = None, memory: float | None = None,
    bytes_per_position: float = 0.0, fixed: float = 0.0, share: bool = True, length: int | None = None,
    pretraining: tuple[int, int] = (8, 512), word: str = "family",
) -> Budget:  # fmt: skip
    """What a microbatch holds under a budget of positions, or of bytes, as (memory - fixed) / bytes_per_position.

    Args:
        families: lengths of each prompt and of its answers, in tokens.
        tokens: positions that a microbatch may have.
        memory: bytes that it may take, instead.
        bytes_per_position: of what is kept for the backward (`moekit.recipes.budget` asks the memory plan).
        fixed: bytes that are taken whatever the microbatch is: weights, gradients, optimizer state.
        share: whether a family's prompt is computed once.
        length: positions of a row, where families stand in rows; then only whole rows count.
        pretraining: rows and length of the microbatch to compare with.
        word: what a family is called ("pair", "group").

    Raises:
        ConfigError: not one budget.
        DataError: no family, or one that is larger than the budget; its place and the remedy.

    >>> print(derive([(600, (100, 100)), (20, (5, 9))], tokens=4096, share=False, word="pair"))
    pretraining microbatch of 8 rows x 512 = 4096 positions; budget of 4096 tokens = 4096 positions; the largest pair \
takes 1400 (a prompt of 600, 2 times, and 2 answers of 200 in all), 8 such take 11200, 2.73 of the budget: they \
overflow; 2 fit for certain; microbatches of the 2 given: 1
    """
    if (tokens is None) == (memory is None) or (memory is not None and bytes_per_position <= 0):
        raise ConfigError(f"a budget is tokens={tokens} or memory={memory} with bytes_per_position, one of them")
    if not len(families):
        raise DataError("there are no families to derive a budget for")
    room, told = tokens or 0, f"{tokens} tokens"
    if memory is not None:
        room = max(0, int((memory - fixed) // bytes_per_position))
        told = f"({memory:.4g} - {fixed:.4g}) bytes at {bytes_per_position:.4g} a position"
    if length is not None:
        room, told = room // length * length, f"{told}, in whole rows of {length},"
    sizes = tuple(family_size(prompt, answers, share) for prompt, answers in families)
    worst, most = int(np.argmax(sizes)), max(sizes)
    prompt, answers = families[worst]
    once = "once" if share else f"{len(answers)} times"
    largest = f"(a prompt of {prompt}, {once}, and {len(answers)} answers of {sum(answers)} in all)"
    limit = min(room, length or room)
    if most > limit:
        remedy = "give a larger budget, longer rows, shorter or fewer answers" + ("" if share else ", or share=True")
        raise DataError(f"{word} {worst} takes {most} positions {largest}, {limit} are there; {remedy}")
    each, rows = limit // most * (room // limit), pretraining[0]
    overflow, parts = rows * most / room, cut(sizes, room)
    text = (
        f"pretraining microbatch of {rows} rows x {pretraining[1]} = {rows * pretraining[1]} positions; budget of "
        f"{told} = {room} positions; the largest {word} takes {most} {largest}, {rows} such take {rows * most}, "
        f"{overflow:.2f} of the budget: {'they overflow' if overflow > 1 else 'they fit'}; {each} fit for certain; "
        f"microbatches of the {len(sizes)} given: {len(parts)}"
    )
    return Budget(room, each, sizes, overflow, parts, text)


def cut(sizes: Sequence[int], positions: int) -> list[list[int]]:
    """Places of families (or rows) as microbatches of at most `positions`: best fit, largest first, always the same.

    How many microbatches other ranks have is the learner's affair.

    >>> cut([30, 70, 20, 80, 60], 100)
    [[2, 3], [0, 1], [4]]
    """
    if max(sizes, default=0) > positions:
        raise DataError(f"one of size {max(sizes)} does not fit into a microbatch of {positions} positions")
    part = best_fit_decreasing(np.asarray(sizes, np.int64), positions)
    return [np.flatnonzero(part == p).tolist() for p in range(int(part.max(initial=-1)) + 1)]
