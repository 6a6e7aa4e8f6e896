"""Checkpoints without a learner: cut, written and read by ranks that are threads or processes of this test."""

import errno
import json
import os
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from moekit.checkpoint import files, write
from moekit.checkpoint.intervals import Piece
from moekit.checkpoint.load import compare, open_checkpoint, show, verify
from moekit.checkpoint.save import latest, read_manifest, retain
from moekit.checkpoint.write import save_state
from moekit.cli import main
from moekit.errors import CheckpointError, StorageError

HERE = Path(__file__).parent
KINDS = ("master", "exp_avg", "exp_avg_sq")
# experts [E=8, 2F=6, D=5], a router, a norm, a norm whose 3 elements are fewer than the ranks, three layers
SHAPES = {
    f"layers.{i}.{name}": shape
    for i in range(4)
    for name, shape in {"gate_up": (8, 6, 5), "router": (8, 5), "norm": (5,), "odd": (3,)}.items()
}


@dataclass(frozen=True)
class Ranks:
    rank: int = 0
    size: int = 1


@dataclass(frozen=True)
class Layout:
    dp: int = 1
    ep: int = 1
    pp: int = 1
    zero: int = 2

    @property
    def size(self):
        return self.dp * self.pp


def owned(layout, rank):
    """The pieces that a rank owns: layers by pp, experts by ep on the first axis, shards of what is left over dp."""
    pp, dp = divmod(rank, layout.dp)
    expert_dp, ep = divmod(dp, layout.ep)
    found = []
    for name, shape in SHAPES.items():
        if int(name.split(".")[1]) % layout.pp != pp:
            continue
        whole = torch.Size(shape).numel()
        if name.endswith("gate_up"):
            low, high = ep * whole // layout.ep, (ep + 1) * whole // layout.ep
            peers, index = layout.dp // layout.ep, expert_dp
        else:
            low, high, peers, index = 0, whole, layout.dp, dp
        if layout.zero == 0:  # replicated: one owner writes it
            if index == 0:
                found.append(Piece(name, shape, low, high))
            continue
        size = -(-(high - low) // peers) + layout.zero - 1  # zero=2 also shifts the cuts away from rows
        start = min(low + index * size, high)
        found.append(Piece(name, shape, start, min(start + size, high)))
    return found


def state(seed=0, dtype=torch.float32, shapes=SHAPES):
    g = torch.Generator().manual_seed(seed)
    draw = lambda shape: torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)
    return {kind: {name: draw(shape) for name, shape in shapes.items()} for kind in KINDS}


def cut(values, pieces):
    return {k: [(p, t[p.name].reshape(-1)[p.start : p.stop]) for p in pieces] for k, t in values.items()}


def together(size, work):
    """Run `work(rank)` for all ranks as threads; returns what each returned or raised."""
    out = [None] * size

    def run(rank):
        try:
            out[rank] = work(rank)
        except Exception as e:  # noqa: BLE001
            out[rank] = e

    threads = [threading.Thread(target=run, args=(r,), name=f"rank {r}") for r in range(size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return out


def save_in(layout, path, values, token="t", **options):
    def work(rank):
        entries = cut(values, owned(layout, rank))
        return save_state(path, entries, {"updates": 7}, world=Ranks(rank, layout.size), token=token, **options).wait()

    return together(layout.size, work)


def save_one(path, values=None, **options):
    values = values or state()
    pieces = [Piece.whole(n, s) for n, s in SHAPES.items()]
    return save_state(path, cut(values, pieces), {"updates": 7}, world=Ranks(), **options)


def read_into(checkpoint, kind, piece, out):
    checkpoint.read(kind, [(piece, out)], names=checkpoint.names(kind))


def load_weights(path, named, strict=True):
    with open_checkpoint(path) as c:
        return c.read("master", list(named.values()), strict=strict, cast=True)


def read_all(path, values):
    """Bitwise: what the checkpoint holds is `values`."""
    with open_checkpoint(path) as c:
        for kind, tensors in values.items():
            assert c.names(kind) == {n: tuple(t.shape) for n, t in tensors.items()}
            for name, t in tensors.items():
                out = torch.full((t.numel(),), 99, dtype=t.dtype)
                read_into(c, kind, Piece.whole(name, t.shape), out)
                assert out.view(torch.uint8).equal(t.reshape(-1).view(torch.uint8)), (kind, name)


LAYOUTS = [
    Layout(1, 1, 1), Layout(2, 1, 1, 0), Layout(4, 2, 1, 1), Layout(2, 2, 1), Layout(4, 4, 1), Layout(2, 2, 2, 1),
    Layout(1, 1, 4), Layout(8, 2, 1),
]  # fmt: skip


@pytest.mark.parametrize("source", LAYOUTS, ids=str)
def test_every_layout_restores_bitwise_in_every_other(tmp_path, source):
    values = state()
    assert save_in(source, tmp_path / "c", values) == [tmp_path / "c"] * source.size
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c"]
    read_all(tmp_path / "c", values)
    with open_checkpoint(tmp_path / "c") as c:
        assert c.manifest["updates"] == 7 and len(c.manifest["files"]) == source.size
        for target in LAYOUTS:
            for rank in range(target.size):
                wanted = owned(target, rank)
                for kind in KINDS:
                    got = [(p, torch.full((len(p),), 99.0)) for p in wanted]
                    assert c.read(kind, got, names=SHAPES) == compare((), ())
                    for p, t in got:
                        assert t.equal(values[kind][p.name].reshape(-1)[p.start : p.stop]), (target, rank, p)


def test_the_simulated_layouts_cut_experts_away_from_rows():
    """The fixture is not symmetric: some cut of [8, 6, 5] falls inside a row, some rank owns nothing of a tensor."""
    pieces = [p for layout in LAYOUTS for r in range(layout.size) for p in owned(layout, r)]
    assert any(p.start % 5 for p in pieces if p.name.endswith("gate_up")) and any(not len(p) for p in pieces)


@pytest.mark.parametrize("dtype", files.DTYPES.values(), ids=str)
def test_every_dtype_keeps_its_bits_and_the_safetensors_library_reads_the_file(tmp_path, dtype):
    """The oracle is the library: same names, dtypes and bits, NaN payloads included."""
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (3 * 8,), dtype=torch.uint8)
    first = bits.view(dtype)
    other = torch.arange(5, dtype=torch.int64)  # another item size in the same file
    world = Ranks()
    entries = {"a": [(Piece.whole("odd", (3,)), torch.tensor([1, 2, 3], dtype=torch.uint8))],
               "b": [(Piece.whole("x", first.shape), first)], "c": [(Piece.whole("y", (5,)), other)]}  # fmt: skip
    save_state(tmp_path / "c", entries, {}, world=world)
    with safe_open(tmp_path / "c" / "rank_00000.safetensors", "pt") as f:
        assert set(f.keys()) == {"a/odd/0", "b/x/0", "c/y/0"}
        assert f.get_tensor("b/x/0").dtype == dtype and f.get_tensor("b/x/0").view(torch.uint8).equal(bits)
        assert f.get_slice("c/y/0")[1:4].tolist() == [1, 2, 3]
    out = torch.zeros(first.shape, dtype=dtype)
    with open_checkpoint(tmp_path / "c") as c:
        read_into(c, "b", Piece.whole("x", first.shape), out)
    assert out.view(torch.uint8).equal(bits)


def test_pieces_of_several_blocks_are_read_at_any_offset(tmp_path):
    """Blocks are 1 MiB: 300,000 doubles are 2.3 of them."""
    t = torch.randn(300_000, dtype=torch.float64)
    cuts = [0, 131_071, 131_072, 262_145, 300_000]
    entries = {"master": [(Piece("w", t.shape, a, b), t[a:b]) for a, b in pairwise(cuts)]}
    save_state(tmp_path / "c", entries, {}, world=Ranks())
    with open_checkpoint(tmp_path / "c") as c:
        for a, b in [(0, 300_000), (1, 2), (131_070, 131_073), (5, 299_999), (262_144, 262_146)]:
            out = torch.zeros(b - a, dtype=t.dtype)
            read_into(c, "master", Piece("w", t.shape, a, b), out)
            assert out.equal(t[a:b])
            low = torch.zeros(b - a, dtype=torch.bfloat16)
            c.read("master", [(Piece("w", t.shape, a, b), low)], cast=True)
            assert low.equal(t[a:b].bfloat16())


# ------------------------------------------------------------------ damage


def damaged(tmp_path, change, file="rank_00001.safetensors"):
    values = state()
    save_in(Layout(2, 2), tmp_path / "c", values)
    path = tmp_path / "c" / file
    data = bytearray(path.read_bytes())
    path.write_bytes(change(data))
    return tmp_path / "c"


def flip(at, bit=0):
    def change(data):
        data[at] ^= 1 << bit
        return data

    return change


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (flip(-1, 7), r"rank_00001\.safetensors is damaged"),
        (flip(-2000), r"rank_00001\.safetensors is damaged"),
        (flip(0), r"rank_00001\.safetensors is damaged: its header"),
        (flip(100), r"rank_00001\.safetensors is damaged: its header"),
        (lambda d: d[:-1], r"rank_00001\.safetensors is truncated: \d+ bytes, its manifest says \d+"),
        (lambda d: d[:0], r"rank_00001\.safetensors is truncated: 0 bytes"),
        (lambda d: d + b"x", r"rank_00001\.safetensors is too long"),
    ],
)
def test_a_damaged_file_is_found_and_named(tmp_path, change, told, capsys):
    path = damaged(tmp_path, change)
    with pytest.raises(CheckpointError, match=told):
        read_all(path, state())
    with pytest.raises(CheckpointError, match=told):
        verify(path)
    assert main(["checkpoint", "verify", str(path)]) == 2
    assert "rank_00001.safetensors" in capsys.readouterr().err


def test_damage_names_the_tensor_and_spares_who_does_not_read_it(tmp_path):
    path = damaged(tmp_path, flip(-1))  # the last file's last bytes: the last tensor of the last kind
    with open_checkpoint(path) as c:
        out = torch.zeros(5)
        with pytest.raises(CheckpointError, match=r"damaged: exp_avg_sq of layers\.3\.norm, elements 4 to 5"):
            read_into(c, "exp_avg_sq", Piece.whole("layers.3.norm", (5,)), out)
        read_into(c, "master", Piece.whole("layers.3.norm", (5,)), out)
    assert out.equal(state()["master"]["layers.3.norm"])
    with open_checkpoint(path, verify=False) as c:
        read_into(c, "exp_avg_sq", Piece.whole("layers.3.norm", (5,)), out)


def test_block_sums_see_every_flipped_bit_lost_page_and_swapped_row():
    data = bytearray(torch.randint(0, 256, (40_000,), dtype=torch.uint8).numpy().tobytes())
    good = files.block_sum(memoryview(data))
    for at in range(0, 40_000, 97):
        data[at] ^= 1 << at % 8
        assert files.block_sum(memoryview(data)) != good
        data[at] ^= 1 << at % 8
    for at in (0, 4096, 7000, 35_000):
        lost = bytearray(data)
        lost[at : at + 4096] = bytes(len(lost[at : at + 4096]))
        assert files.block_sum(memoryview(lost)) != good
    swapped = data[4096:8192] + data[:4096] + data[8192:]
    assert files.block_sum(memoryview(swapped)) != good
    assert files.block_sum(memoryview(data[8:16] + data[:8] + data[16:])) != good
    assert files.block_sum(memoryview(data)) == good


def test_a_missing_file_and_a_broken_manifest_are_named(tmp_path, capsys):
    values = state()
    save_in(Layout(2, 1), tmp_path / "c", values)
    (tmp_path / "c" / "rank_00001.safetensors").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"c lacks rank_00001\.safetensors"):
        read_all(tmp_path / "c", values)
    assert main(["checkpoint", "verify", str(tmp_path / "c")]) == 2
    assert "lacks rank_00001.safetensors" in capsys.readouterr().err
    (tmp_path / "elsewhere").rename(tmp_path / "c" / "rank_00001.safetensors")
    manifest = tmp_path / "c" / "manifest.json"
    text = manifest.read_text()
    for broken in (text[:-40], text.replace('"updates": 7', '"updates": 8'), "[1]", text.replace("exp_avg", "exp_abc")):
        manifest.write_text(broken)
        with pytest.raises(CheckpointError, match=r"manifest\.json is broken"):
            read_all(tmp_path / "c", values)
    manifest.write_text('{"format": 3}')
    with pytest.raises(CheckpointError, match="format 3; this moekit reads format 2"):
        read_manifest(tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"has no manifest\.json"):
        verify(tmp_path / "nothing")
    manifest.write_text(text)
    (tmp_path / "c" / "rank_00007.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"rank_00007\.safetensors is not of this checkpoint"):
        verify(tmp_path / "c")


def test_the_file_of_a_rank_that_owns_nothing_is_verified_too(tmp_path):
    one = {"master": [(Piece.whole("w", (3,)), torch.ones(3))]}
    work = lambda rank: save_state(tmp_path / "c", one if rank == 0 else {}, {}, world=Ranks(rank, 2), token="t")
    together(2, work)
    assert "2 files" in verify(tmp_path / "c")
    (tmp_path / "c" / "rank_00001.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"rank_00001\.safetensors is truncated"):
        verify(tmp_path / "c")


# ------------------------------------------------------------------ names


def test_bc_066_a_load_is_a_bijection_between_names(tmp_path):
    """BC-066: checkpoint {a, extra}; strict loads into {a} and {a, miss} raise; else both lists come back."""
    piece = {n: Piece.whole(n, (2,)) for n in ("a", "extra", "miss")}
    entries = {"master": [(piece[n], torch.tensor([1.0, 2.0])) for n in ("a", "extra")]}
    save_state(tmp_path / "c", entries, {}, world=Ranks())
    new = lambda *names: {n: (piece[n], torch.full((2,), 5.0)) for n in names}
    only, both = new("a"), new("a", "miss")
    with pytest.raises(CheckpointError, match="surplus: extra"):
        load_weights(tmp_path / "c", only)
    with pytest.raises(CheckpointError, match="missing: miss; surplus: extra"):
        load_weights(tmp_path / "c", both)
    assert only["a"][1].tolist() == both["a"][1].tolist() == [5, 5]  # nothing was read
    report = load_weights(tmp_path / "c", both, strict=False)
    assert (report.missing, report.surplus) == (("miss",), ("extra",))
    assert both["a"][1].tolist() == [1, 2] and both["miss"][1].tolist() == [5, 5]


def test_bc_062_a_renamed_tensor_is_told_under_both_names_and_a_full_load_writes_every_element(tmp_path):
    """BC-062, for our own checkpoints: targets full of NaN; no NaN is left, or the load names what does not fit."""
    save_one(tmp_path / "c")
    targets = {n: (Piece.whole(n, s), torch.full((torch.Size(s).numel(),), torch.nan)) for n, s in SHAPES.items()}
    assert load_weights(tmp_path / "c", targets) == compare((), ())
    assert sum(int(t.isnan().sum()) for _, t in targets.values()) == 0
    renamed = {n.replace("1.gate_up", "1.w2"): v for n, v in targets.items()}
    piece, t = renamed["layers.1.w2"]
    renamed["layers.1.w2"] = (Piece("layers.1.w2", piece.shape, piece.start, piece.stop), t)
    with pytest.raises(CheckpointError, match=r"missing: layers\.1\.w2; surplus: layers\.1\.gate_up"):
        load_weights(tmp_path / "c", renamed)


def test_weights_alone_are_the_rounded_masters_and_other_shapes_and_dtypes_are_refused(tmp_path):
    values = state()
    save_in(Layout(2, 2), tmp_path / "c", values)
    new = lambda shape: torch.zeros(torch.Size(shape).numel(), dtype=torch.bfloat16)
    targets = {n: (Piece.whole(n, s), new(s)) for n, s in SHAPES.items()}
    load_weights(tmp_path / "c", targets)
    for n, (_, t) in targets.items():
        assert t.equal(values["master"][n].bfloat16().reshape(-1)), n
    with open_checkpoint(tmp_path / "c") as c:
        low = torch.zeros(3, dtype=torch.bfloat16)
        with pytest.raises(CheckpointError, match=r"layers\.0\.odd is torch\.float32 in .*, torch\.bfloat16 is wanted"):
            read_into(c, "exp_avg", Piece.whole("layers.0.odd", (3,)), low)
        with pytest.raises(CheckpointError, match=r"another shape: \[3\] in .*, \[3, 1\] wanted"):
            read_into(c, "exp_avg", Piece.whole("layers.0.odd", (3, 1)), torch.zeros(3))
        with pytest.raises(CheckpointError, match="flat tensor of 3 elements"):
            read_into(c, "exp_avg", Piece.whole("layers.0.odd", (3,)), torch.zeros(4))


# ------------------------------------------------------------------ the call is the snapshot


@pytest.mark.parametrize("slow", [0.0, 1.0])
def test_bc_059_the_call_defines_the_snapshot(tmp_path, monkeypatch, slow):
    """BC-059: w = [1, 1, 1], saved asynchronously, then filled with 2: the file holds ones, and so do moments."""
    push = files.push
    monkeypatch.setattr(files, "push", lambda fd, data: (time.sleep(slow / 4), push(fd, data)))
    tensors = {kind: torch.ones(3) for kind in KINDS}
    entries = {kind: [(Piece.whole("w", (3,)), t)] for kind, t in tensors.items()}
    began = time.monotonic()
    manifest = {"data": {"row": 5}}
    saving = save_state(tmp_path / "c", entries, manifest, world=Ranks(), asynchronous=True)
    assert not slow or not saving.done
    manifest["data"]["row"] = 6
    for t in tensors.values():
        t.fill_(2)
    assert saving.wait() == tmp_path / "c" and saving.done and time.monotonic() - began >= slow
    assert read_manifest(tmp_path / "c")["data"] == {"row": 5}
    read_all(tmp_path / "c", {kind: {"w": torch.ones(3)} for kind in KINDS})


def test_one_save_in_flight_and_the_staging_buffer_is_used_again(tmp_path, monkeypatch):
    push = files.push
    monkeypatch.setattr(files, "push", lambda fd, data: (time.sleep(0.02), push(fd, data)))
    first, second = state(1), state(2)
    save_one(tmp_path / "a", first, asynchronous=True)
    at = write._staging[0].data_ptr()
    with pytest.warns(UserWarning, match="a is still being written; waiting"):
        last = save_one(tmp_path / "b", second, asynchronous=True)
    assert (tmp_path / "a").exists() and write._staging[0].data_ptr() == at
    last.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_one(tmp_path / "d", first)  # nothing in flight, nothing said
    read_all(tmp_path / "a", first)
    read_all(tmp_path / "b", second)


AT_EXIT = """
import sys, time, torch
from moekit.checkpoint import files, write
from moekit.checkpoint.intervals import Piece
class World: rank, size = 0, 1
entries = {"master": [(Piece.whole("w", (3,)), torch.ones(3))]}
push = files.push
def slow(fd, data):
    time.sleep(0.2)
    push(fd, data)
def full(fd, data):
    raise OSError(28, "No space left on device")
files.push = full
failing = write.save_state(sys.argv[1] + "/fail", entries, {}, world=World, asynchronous=True)
failing._thread.join()
write._saves["nobody asks"] = write._saves.pop(0)
files.push = slow
write.save_state(sys.argv[1] + "/good", entries, {}, world=World, asynchronous=True)
"""


def test_at_exit_a_save_is_finished_and_a_failure_is_told(tmp_path):
    command = [sys.executable, "-c", AT_EXIT, str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    read_all(tmp_path / "good", {"master": {"w": torch.ones(3)}})
    assert "fail was not saved: cannot write" in done.stderr and "disk is full" in done.stderr
    assert len(done.stderr.splitlines()) == 1 and [p.name for p in tmp_path.iterdir()] == ["good"]


def test_a_failed_background_save_is_raised_by_wait_and_else_by_the_next_call(tmp_path, monkeypatch):
    def full(fd, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(files, "push", full)
        with pytest.raises(StorageError, match="disk is full"):
            save_one(tmp_path / "a", asynchronous=True).wait()
        unasked = save_one(tmp_path / "a", asynchronous=True)
        unasked._thread.join()
    with pytest.raises(StorageError, match="disk is full"):
        save_one(tmp_path / "b")
    assert list(tmp_path.iterdir()) == []
    save_one(tmp_path / "b")
    read_all(tmp_path / "b", state())


# ------------------------------------------------------------------ whole or not at all


def test_a_rank_that_cannot_write_is_named_on_every_rank(tmp_path, monkeypatch):
    values, layout = state(), Layout(4, 2)
    save_in(layout, tmp_path / "c", values)
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "c").iterdir()}
    whole = write.write_file

    def broken(path, entries):
        if "00002" in path.name:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        return whole(path, entries)

    with monkeypatch.context() as m:
        m.setattr(write, "write_file", broken)
        errors = save_in(layout, tmp_path / "c", state(1), "second", overwrite=True, patience=20)
    assert all(isinstance(e, StorageError) and "rank 2: cannot write" in str(e) for e in errors), errors
    assert before == {p.name: p.stat().st_mtime_ns for p in (tmp_path / "c").iterdir()}
    read_all(tmp_path / "c", values)
    left = [p for p in tmp_path.rglob("*.safetensors") if p.parent.name != "c"]
    assert left == []  # no data stays, only the reason, until the next save
    assert save_in(layout, tmp_path / "c", state(2), "third", overwrite=True) == [tmp_path / "c"] * 4
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    read_all(tmp_path / "c", state(2))


def test_a_value_that_does_not_fit_on_one_rank_ends_the_save_on_all(tmp_path):
    values, layout = state(), Layout(2, 1)

    def work(rank):
        entries = cut(values, owned(layout, rank))
        if rank == 1:
            entries["master"][0] = (entries["master"][0][0], torch.zeros(1))
        save_state(tmp_path / "c", entries, {}, world=Ranks(rank, 2), token="t", patience=20)

    began = time.monotonic()
    errors = together(2, work)
    assert all("rank 1: master of layers.0.gate_up: a contiguous flat tensor" in str(e) for e in errors), errors
    assert time.monotonic() - began < 10 and not (tmp_path / "c").exists()


def test_a_rank_that_never_comes_is_named_in_bounded_time(tmp_path):
    values, layout = state(), Layout(2, 1)

    def work(rank):
        if rank == 1:
            return
        entries = cut(values, owned(layout, rank))
        save_state(tmp_path / "c", entries, {}, world=Ranks(rank, 2), token="t", patience=0.3)

    began = time.monotonic()
    error, _ = together(2, work)
    assert "rank 0: " in str(error) and "no sign of rank 1 for 0.3 s" in str(error) and time.monotonic() - began < 3
    assert not (tmp_path / "c").exists() and not list(tmp_path.rglob("*.safetensors"))


def test_a_slow_rank_that_makes_progress_is_waited_for(tmp_path, monkeypatch):
    push = files.push

    def slow(fd, data):
        time.sleep(0.12 if threading.current_thread().name == "rank 1" else 0)
        push(fd, data)

    monkeypatch.setattr(files, "push", slow)
    began = time.monotonic()  # rank 1 has 12 pieces: 1.44 s, more than rank 0's patience; one of them takes far less
    assert save_in(Layout(1, 1, 4), tmp_path / "c", state(), patience=1.0) == [tmp_path / "c"] * 4
    assert time.monotonic() - began > 1.4


def test_what_a_dead_attempt_left_is_never_taken_for_this_one(tmp_path, monkeypatch):
    """Rank 1's file of a killed attempt lies there, complete, with other values; the next attempt has its own token."""
    layout, old, new = Layout(2, 1), state(1), state(2)
    entries = cut(old, owned(layout, 1))
    with pytest.raises(CheckpointError, match=r"no sign of rank 0"):
        monkeypatch.setattr(write._Attempt, "failed", lambda self, error: error)  # as if it had been killed
        save_state(tmp_path / "c", entries, {}, world=Ranks(1, 2), token="dead", patience=-1.9)
    monkeypatch.undo()
    (left,) = tmp_path.iterdir()
    assert (left / "rank_00001.json").exists()
    assert save_in(layout, tmp_path / "c", new, "alive") == [tmp_path / "c"] * 2
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    read_all(tmp_path / "c", new)


def test_pieces_that_are_not_the_whole_and_values_that_do_not_fit_are_refused(tmp_path):
    w = lambda a, b: (Piece("w", (10,), a, b), torch.zeros(b - a))
    for spans, told in [([(0, 4), (6, 10)], r"'master' .* nobody holds \[4, 6\) of w"),
                        ([(0, 6), (4, 10)], r"more than one holds \[4, 6\) of w")]:  # fmt: skip
        with pytest.raises(CheckpointError, match=told):
            save_state(tmp_path / "c", {"master": [w(*s) for s in spans]}, {}, world=Ranks())
    piece = Piece("w", (10,), 0, 10)
    for bad in (torch.zeros(9), torch.zeros(2, 5), torch.zeros(20)[::2], torch.zeros(10, dtype=torch.complex64)):
        with pytest.raises(CheckpointError, match="master of w: a contiguous flat tensor of 10 elements"):
            save_state(tmp_path / "c", {"master": [(piece, bad)]}, {}, world=Ranks())
    with pytest.raises(CheckpointError, match="needs a token"):
        save_state(tmp_path / "c", {}, {}, world=Ranks(0, 2))
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_kept_or_replaced_whole(tmp_path):
    save_one(tmp_path / "c", state(1))
    with pytest.raises(CheckpointError, match="exists already"):
        save_one(tmp_path / "c", state(2))
    read_all(tmp_path / "c", state(1))
    save_one(tmp_path / "c", state(2), overwrite=True)
    read_all(tmp_path / "c", state(2))
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_replacing_works_where_the_file_system_cannot_exchange(tmp_path, monkeypatch):
    from moekit.checkpoint import save

    save_one(tmp_path / "c", state(1))
    monkeypatch.setattr(save.ctypes, "CDLL", lambda _: object())
    save_one(tmp_path / "c", state(2), overwrite=True)
    read_all(tmp_path / "c", state(2))
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_latest_and_retain_see_complete_checkpoints_only(tmp_path):
    for n in (2, 10, 9):
        save_one(tmp_path / f"step_{n}")
    (tmp_path / "step_11").mkdir()  # no manifest: not a checkpoint
    (tmp_path / ".step_9.dead.partial").mkdir()
    (tmp_path / ".step_12.next.partial").mkdir()  # another rank may have begun it
    (tmp_path / "step_x").mkdir()
    assert latest(tmp_path) == tmp_path / "step_10" and latest(tmp_path / "none") is None
    retain(tmp_path, 2)
    stay = [".step_12.next.partial", "step_10", "step_11", "step_9", "step_x"]
    assert sorted(p.name for p in tmp_path.iterdir()) == stay
    retain(tmp_path, 0)  # the newest complete one always stays
    assert latest(tmp_path) == tmp_path / "step_10" and not (tmp_path / "step_9").exists()


def test_a_file_that_vanishes_before_the_manifest_is_written_ends_the_save(tmp_path, monkeypatch):
    whole = write.write_file

    def gone(path, entries):
        entry = whole(path, entries)
        if "00001" in path.name:
            path.unlink()
        return entry

    monkeypatch.setattr(write, "write_file", gone)
    errors = save_in(Layout(2, 1), tmp_path / "c", state())
    assert all("rank_00001.safetensors was taken away" in str(e) for e in errors), errors
    assert not (tmp_path / "c").exists()


def killed(tmp_path, moments):
    """Run killed.py; what it counted."""
    command = [sys.executable, str(HERE / "killed.py"), str(tmp_path), str(moments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_a_kill_at_any_moment_leaves_the_previous_checkpoint(tmp_path):
    counted = killed(tmp_path, 6)
    assert counted["kills"] == 6 and counted["checked"] >= 6


@pytest.mark.long
def test_a_kill_at_24_more_moments_leaves_the_previous_checkpoint(tmp_path):
    counted = killed(tmp_path, 24)
    assert counted["kills"] == 24 and counted["mid_save"] >= 12 and counted["checked"] >= 24


# ------------------------------------------------------------------ the command


def test_show_and_verify_say_what_is_there(tmp_path, capsys):
    values = state()
    layout = Layout(2, 2)

    def work(rank):
        manifest = {"updates": 12, "skipped": 1, "dtype": "bfloat16", "layout": {"dp": 2, "ep": 2}}
        entries = cut(values, owned(layout, rank))
        save_state(tmp_path / "checkpoints" / "step_12", entries, manifest, world=Ranks(rank, 2), token="t")

    together(2, work)
    assert main(["checkpoint", "show", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    elements = sum(torch.Size(s).numel() for s in SHAPES.values())
    size = sum(p.stat().st_size for p in (tmp_path / "checkpoints" / "step_12").glob("*.safetensors"))
    for part in ("step_12", "12 (and 1 skipped)", "dp=2, ep=2", "bfloat16", f"parameters    {elements:,}", f"{size:,}",
                 "exp_avg_sq", torch.__version__):  # fmt: skip
        assert part in told, (part, told)
    assert main(["checkpoint", "verify", str(tmp_path)]) == 0
    assert f"2 files, {size:,} bytes" in capsys.readouterr().out
    assert show(tmp_path / "checkpoints") == told.rstrip("\n")
    assert main(["checkpoint", "show", str(tmp_path / "nothing")]) == 2
    assert "nothing is not a checkpoint" in capsys.readouterr().err


def test_a_folder_that_is_put_in_place_while_another_rank_looks_is_no_error(tmp_path, monkeypatch):
    """Rank 0 renames the temporary folder between rank 1's look at its name and its look inside."""
    attempt = write._Attempt(tmp_path / "c", 1, 2, "token", 5.0)
    attempt.folder.mkdir()
    look = os.scandir

    def renamed(path):
        monkeypatch.setattr(os, "scandir", look)
        attempt.folder.rename(tmp_path / "c")
        (tmp_path / "c" / "manifest.json").write_text('{"token": "token"}')
        return look(path)

    monkeypatch.setattr(os, "scandir", renamed)
    attempt._wait()
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
