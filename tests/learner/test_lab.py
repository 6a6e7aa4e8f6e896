"""The denominator lab against the learner itself, convention by convention and cut by cut."""

from dataclasses import replace

import pytest
import torch

from moekit.config import LearnerConfig
from moekit.data.batch import Batch
from moekit.errors import ConfigError
from moekit.learner.lab import DenominatorLab
from moekit.learner.learner import Learner
from moekit.learner.mesh import World
from moekit.model.presets import preset
from moekit.model.transformer import Transformer
from moekit.objectives.sft import SFT

CONFIG = replace(preset("tiny"), layers=2)


def batch():
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, CONFIG.vocab, (4, 10), generator=g)
    segment = torch.tensor([[0] * 6 + [1] * 4, [0] * 10, [0] * 3 + [-1] * 7, [0] * 5 + [1] * 5])
    labels = Batch.make(ids, segment=segment).labels
    labels[1, :5] = -100
    return Batch.make(ids, segment=segment, labels=labels)


def model():
    return Transformer(CONFIG, dtype=torch.float64, seed=3)


@pytest.fixture(scope="module")
def lab():
    return DenominatorLab(model(), batch(), SFT())


def gradient(mode, parts):
    """The learner's own gradient on one rank, and its loss."""
    learner = Learner(model(), SFT(mode, constant_length=10), LearnerConfig(clip_norm=None, lr=0.0), World())
    loss = learner.step(parts)["loss/sft"]
    return loss, torch.cat([g.reshape(-1) for _, g in sorted(learner.gradient().items())])


@pytest.mark.parametrize("mode", ["global_tokens", "sequence_mean", "constant", "microbatch_mean", "rank_mean"])
def test_equals_the_learner(lab, mode):
    whole = batch()
    exact_loss, exact = gradient("global_tokens", [whole])
    for microbatches, rows in ((1, 4), (2, 2), (4, 1)):
        loss, got = gradient(mode, whole.split(rows))
        read = lab.measure(mode, 1, microbatches)
        assert read.loss == pytest.approx(loss, rel=1e-9) and read.exact_loss == pytest.approx(exact_loss, rel=1e-9)
        assert read.norm_ratio == pytest.approx(float(got.norm() / exact.norm()), rel=1e-9)
        assert read.cosine == pytest.approx(float(got @ exact / got.norm() / exact.norm()), rel=1e-9)


def test_rank_mean_is_the_mean_of_rank_means(lab):
    whole = batch()
    parts = [gradient("global_tokens", [half]) for half in whole.split(2)]
    _, exact = gradient("global_tokens", [whole])
    biased = (parts[0][1] + parts[1][1]) / 2
    read = lab.measure("rank_mean", ranks=2)
    assert read.loss == pytest.approx((parts[0][0] + parts[1][0]) / 2, rel=1e-9)
    assert read.cosine == pytest.approx(float(biased @ exact / biased.norm() / exact.norm()), rel=1e-9)
    assert read.cosine < 0.9999


def test_exact_conventions_ignore_the_cut_and_biased_ones_do_not(lab):
    for mode in ("global_tokens", "sequence_mean", "constant"):
        readings = {(round(r.loss, 12), round(r.norm_ratio, 12)) for r in
                    (lab.measure(mode, ranks, mb) for ranks in (1, 2, 4) for mb in (1, 2))}  # fmt: skip
        assert len(readings) == 1, mode
    assert len({round(lab.measure("microbatch_mean", r, m).loss, 9) for r in (1, 2) for m in (1, 2)}) > 1


def test_filter_bias_is_kept_over_kept_plus_removed(lab):
    """The source's convention shrinks loss and gradient by U / (U + removed * (T - 1)) and leaves the direction."""
    whole = lab.measure("kept_plus_filtered")
    assert whole.norm_ratio == pytest.approx(1.0) and whole.cosine == pytest.approx(1.0)
    read = lab.measure("kept_plus_filtered", removed=[0, 3])
    shrink = read.supervised / (read.supervised + 2 * 9)
    assert read.norm_ratio == pytest.approx(shrink) and read.cosine == pytest.approx(1.0)
    assert read.loss == pytest.approx(read.exact_loss * shrink)


def test_refuses_a_model_that_a_learner_holds():
    held = model()
    Learner(held, SFT(), world=World())
    with pytest.raises(ConfigError, match="Learner"):
        DenominatorLab(held, batch(), SFT())
