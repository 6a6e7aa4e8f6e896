"""The instance filter: finds token sequences in which a short pattern repeats over and over.

Axis letters: N tokens of many instances laid end to end, I instances.

Such sequences (a loop of dashes, a stuck generation) carry a large gradient and teach nothing. The filter removes the
whole instance from the loss; its tokens stay in the row and are still routed, which is why it belongs to the
accounting (`kept_plus_filtered` in `moekit.objectives.denominator`)."""

import numpy as np

from ..errors import ConfigError


def is_periodic(ids: np.ndarray | list[int], max_period: int = 13, min_repeats: int = 32) -> bool:
    """Whether some pattern of 1..`max_period` tokens occurs at least `min_repeats` times in a row.
    Args:
        ids: [n] integers, one instance without its padding (pads are a pattern of period 1 themselves).
        max_period: longest pattern looked for, in tokens, at least 1.
        min_repeats: whole repeats needed, at least 2; a last partial repeat does not count.
    Cost: O(n * max_period), vectorised.
    >>> is_periodic([7] * 32), is_periodic([7] * 31), is_periodic([1, 2, 3] * 32), is_periodic(list(range(999)))
    (True, False, True, False)
    """
    ids = np.asarray(ids)
    return bool(find_periodic(ids, np.array([0, len(ids)]), max_period, min_repeats)[0])


def find_periodic(ids_N: np.ndarray, offset_I: np.ndarray, max_period: int = 13, min_repeats: int = 32) -> np.ndarray:
    """`is_periodic` for many instances laid end to end.

    A pattern of p tokens repeats m times where ids[i] = ids[i + p] holds for (m - 1) p neighbouring i.
    Args: `ids_N`: [N] integers. `offset_I`: [I + 1] ascending, instance i is `ids_N[offset_I[i]:offset_I[i + 1]]`.
    Returns: [I] bool.
    Cost: `max_period` passes over N tokens."""
    if max_period < 1 or min_repeats < 2:
        raise ConfigError(f"filter: max_period={max_period} must be at least 1, min_repeats={min_repeats} at least 2")
    offset_I = np.asarray(offset_I, np.int64)
    found_I = np.zeros(len(offset_I) - 1, bool)
    length_I = np.diff(offset_I)
    instance_N = np.repeat(np.arange(len(length_I)), length_I)
    for period in range(1, max_period + 1):
        window = period * (min_repeats - 1)
        if len(ids_N) < window + period:
            break
        same = (ids_N[:-period] == ids_N[period:]) & (instance_N[:-period] == instance_N[period:])
        # An equality never spans two instances, so an unbroken run of them lies in one instance.
        breaks = np.flatnonzero(~same)
        start = np.concatenate([[0], breaks + 1])
        run = np.concatenate([breaks, [len(same)]]) - start
        found_I[instance_N[start[run >= window]]] = True
    return found_I
