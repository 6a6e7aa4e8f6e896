"""The instance filter against a slow definition of "a pattern repeats m times in a row"."""

import numpy as np
import pytest

from moekit.data.filters import find_periodic, is_periodic
from moekit.errors import ConfigError


def slow(ids, max_period, min_repeats):
    """Compare every window of period * repeats tokens with its first period, repeated."""
    for period in range(1, max_period + 1):
        n = period * min_repeats
        for at in range(len(ids) - n + 1):
            if list(ids[at : at + n]) == list(ids[at : at + period]) * min_repeats:
                return True
    return False


@pytest.mark.parametrize("period", [1, 2, 7, 13])
def test_threshold_is_exact(period):
    pattern = list(range(100, 100 + period))
    around = [1, 2, 3], [4, 5]
    assert is_periodic([*around[0], *pattern * 32, *around[1]])
    assert not is_periodic([*around[0], *(pattern * 32)[:-1], *around[1]])


def test_longer_periods_do_not_count():
    assert not is_periodic(list(range(14)) * 40)
    assert is_periodic(list(range(14)) * 40, max_period=14)


def test_against_the_definition():
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(300):
        ids = rng.integers(0, 2, rng.integers(0, 40))
        want = slow(ids, 3, 4)
        found += want
        assert is_periodic(ids, 3, 4) == want
    assert 50 < found < 250  # the test sees both answers


def test_many_instances_are_judged_apart():
    """A run that spans two instances belongs to neither; each has its own answer."""
    rng = np.random.default_rng(1)
    parts = [rng.integers(0, 2, rng.integers(1, 30)) for _ in range(200)]
    offset = np.cumsum([0, *map(len, parts)])
    want = [slow(p, 3, 4) for p in parts]
    assert find_periodic(np.concatenate(parts), offset, 3, 4).tolist() == want
    assert find_periodic(np.array([7] * 62), np.array([0, 31, 62])).tolist() == [False, False]


def test_bad_settings():
    with pytest.raises(ConfigError, match="min_repeats=1"):
        is_periodic([1, 2], min_repeats=1)
