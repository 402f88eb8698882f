"""
A run's folder and its checkpoints: what is damaged is skipped, what does not fit is refused in a line, and
nothing is lost that nobody asked to delete.
"""
import json
import os
import random
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import checkpoint
import data
import quant
import train
from build import RECIPES, only
from checkpoint import Run, fingerprint, read, sources
from config import parse
from quant import RULES, Rule
from test_train import (FULL, assert_same, go, last_state, learned, rows, shards, straight,  # noqa: F401
                        timeless, tiny)

BF16 = ["--recipe=bf16", "--steps=12", "--save_every=4"]


@pytest.fixture(scope="module")
def half(shards, tmp_path_factory) -> Path:  # noqa: F811
    """ The folder of a run of 20 steps that was stopped after 10, in both windows, and saved after 5 too. """
    out = tmp_path_factory.mktemp("half")
    assert train.main(tiny(shards, f"--out={out}", "--name=r", *FULL, "--save_every=5", "--stop_at=10")) == 0
    return out / "r"


@pytest.fixture
def copy(half, tmp_path) -> Path:
    """ A copy of that folder, to go on from: go("r", *FULL). """
    return Path(shutil.copytree(half, tmp_path / "r"))


# -----------------------------------------------------------------------------
# damage


def cut(content: bytes) -> bytes:
    return content[:13131]


def flip(content: bytes) -> bytes:
    """ One bit in the middle of the largest record. """
    at = len(content) // 2
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize("damage", [cut, flip, lambda content: b"", lambda content: b"not a checkpoint"])
def test_a_damaged_checkpoint_is_skipped(go, copy, straight, damage):  # noqa: F811
    """
    Catches: a resume that trusts the newest file, dies of it or takes it for a fault of the disk. A flipped
    bit of a weight loads without a word, unless the zip's checksums are looked at.
    """
    path = copy / "ckpt_000000010.pt"
    path.write_bytes(damage(path.read_bytes()))
    _, printed = go("r", *FULL)
    assert "skipping a checkpoint: " in printed and "ckpt_000000005.pt, step 5" in printed
    assert_same(learned(last_state(straight)), learned(last_state(copy)))
    assert timeless(straight) == timeless(copy)


def test_a_flip_anywhere_is_seen_or_harmless(half, tmp_path):
    """ Catches: a part of the file that no checksum guards and that is believed. """
    content, good = (half / "ckpt_000000010.pt").read_bytes(), read(half / "ckpt_000000010.pt")
    generator, path = random.Random(1), tmp_path / "c.pt"
    for _ in range(60):
        at, bit = generator.randrange(len(content)), 1 << generator.randrange(8)
        path.write_bytes(content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :])
        try:
            assert_same(good, read(path))       # it fell on padding
        except ValueError as error:
            assert "\n" not in str(error)


def test_a_run_whose_checkpoints_are_all_damaged_is_not_overwritten(go, copy):  # noqa: F811
    """ Catches: a fresh start over what may still be mended. """
    for path in copy.glob("ckpt_*.pt"):
        path.write_bytes(cut(path.read_bytes()))
    before = {path: path.read_bytes() for path in copy.iterdir() if path.name != "log.txt"}
    assert "none can be read" in go("r", *FULL, code=2)[1]
    assert before == {path: path.read_bytes() for path in copy.iterdir() if path.name != "log.txt"}


def test_a_checkpoint_with_code_in_it_is_refused(copy, tmp_path):
    """ Catches: torch.load without weights_only, which would run whatever a file says. """
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "evil"),)
    torch.save({"format": checkpoint.FORMAT, "evil": Evil()}, copy / "ckpt_000000010.pt")
    with pytest.raises(ValueError, match="torn or no checkpoint"):
        read(copy / "ckpt_000000010.pt")
    assert not (tmp_path / "evil").exists()


def change(path: Path, spoil):
    state = read(path)
    spoil(state)
    torch.save(state, path)


@pytest.mark.parametrize("spoil", [
    lambda s: s["model"].pop("head.weight"), lambda s: s["model"].update(extra=torch.ones(1)),
    lambda s: s["model"].update({"head.weight": torch.ones(3, 3)}),
    lambda s: s["model"].update({"head.weight": s["model"]["head.weight"].double()}),
    lambda s: s["model"].update({"blocks.0.mlp.up.channels": torch.arange(3)})])
def test_weights_that_do_not_fit_are_one_line(go, copy, spoil):  # noqa: F811
    """ Catches: PyTorch's own list of complaints, and weights of another type that are cast in silence. """
    change(copy / "ckpt_000000010.pt", spoil)
    assert "the checkpoint does not fit this model" in go("r", *FULL, code=2)[1]


def test_another_format_is_no_checkpoint(go, copy):  # noqa: F811
    """ Catches: a checkpoint of an older program that is read as if it were ours. """
    change(copy / "ckpt_000000010.pt", lambda state: state.update(format=1))
    assert "ckpt_000000010.pt is no checkpoint of this program" in go("r", *FULL)[1]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
@pytest.mark.parametrize("name", ["log.txt", "metrics.csv", "config.json", "ckpt_000000099.pt",
                                  "ckpt_000000099.tmp", "metrics.csv.tmp"])
def test_only_regular_files_are_opened(go, copy, name):  # noqa: F811
    """ Catches: a run that hangs for ever, without a word, at a pipe that nobody writes to. """
    (copy / name).unlink(missing_ok=True)
    os.mkfifo(copy / name)
    if name.startswith("ckpt") or name.endswith("tmp"):
        assert "continuing from" in go("r", *FULL, "--stop_at=11")[1]
    else:
        assert f"{name} is no regular file" in go("r", *FULL, code=2)[1]


# -----------------------------------------------------------------------------
# saving


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError(
    "[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0\nmore")], ids=["OSError", "torch"])
def test_a_full_disk_keeps_the_previous_checkpoint(go, monkeypatch, error):  # noqa: F811
    """ Catches: a failed save that ends the run, deletes the good checkpoint, or goes unnoticed. """
    folder, _ = go("r", *BF16, "--stop_at=4")

    def full(state, file):
        file.write(b"half of it")
        raise error
    monkeypatch.setattr(torch, "save", full)
    _, printed = go("r", *BF16, code=1)
    monkeypatch.undo()
    assert printed.count("cannot save") == 2 and "ckpt_000000004.pt is kept" in printed
    assert [path.name for path in folder.glob("ckpt_*")] == ["ckpt_000000004.pt"]
    # with space again, the run goes on from there
    assert "step 4" in go("r", *BF16)[1]


def test_a_full_disk_loses_a_row_and_not_the_run(go, monkeypatch):  # noqa: F811
    """ Catches: a run that ends over a line of a log; half a row that is read as another number later. """
    real = open

    def full(path, *args, **kwargs):
        if str(path).endswith("metrics.csv"):
            raise OSError(28, "No space left on device")
        return real(path, *args, **kwargs)
    monkeypatch.setattr(checkpoint, "open", full, raising=False)
    folder, printed = go("r", *BF16, "--stop_at=4")
    monkeypatch.undo()
    assert "a row of metrics.csv is lost: No space left" in printed
    with open(folder / "metrics.csv", "a") as file:
        file.write("2,256,9")
    go("r", *BF16)
    assert [int(row["step"]) for row in rows(folder)] == list(range(4, 13))


def test_files_that_look_like_checkpoints_cost_nothing(go):  # noqa: F811
    """
    Catches: pruning by name. A copy that the user made, or a torn file with a higher number, once made each
    new checkpoint look old, so that it was deleted as soon as it was written.
    """
    folder, _ = go("r", *BF16, "--stop_at=2")
    for copy in ("ckpt_best.pt", "ckpt_000000097.pt"):      # the second one is not that of step 97
        (folder / copy).write_bytes((folder / "ckpt_000000002.pt").read_bytes())
    (folder / "ckpt_000000099.pt").write_bytes(b"")
    (folder / "ckpt_000000098.pt").mkdir()
    (folder / "notes.tmp").mkdir()
    assert "ckpt_000000002.pt, step 2" in go("r", *BF16)[1]
    left = {path.name for path in folder.glob("ckpt_0000000[0-8]*") if path.is_file()}
    assert left == {"ckpt_000000008.pt", "ckpt_000000012.pt"} and (folder / "ckpt_best.pt").exists()


def test_resuming_forgets_the_rows_that_will_be_written_again(go, copy, straight):  # noqa: F811
    """ Catches: metrics.csv with two rows for one step, or a gap, after a kill between two checkpoints. """
    with open(copy / "metrics.csv", "a") as file:
        file.write("10,1280,9\n11,14")                      # rows of steps after the checkpoint, one cut off
    go("r", *FULL)
    assert timeless(copy) == timeless(straight)


@pytest.mark.parametrize("content", [b"a,b,c\n1,2,3\n", b"\xff\xfe\x00", None])
def test_metrics_that_cannot_be_read_do_not_stop_a_resume(go, copy, content):  # noqa: F811
    """ Catches: a traceback over a file that is not needed to go on. """
    (copy / "metrics.csv").unlink()
    if content is not None:
        (copy / "metrics.csv").write_bytes(content)
    go("r", *FULL, "--stop_at=12")
    assert [int(row["step"]) for row in rows(copy)] == [10, 11]


# -----------------------------------------------------------------------------
# whose run it is


def test_a_different_run_is_not_overwritten(go):  # noqa: F811
    """ Catches: two runs in one folder; advice that is then refused, or that deletes the run. """
    folder, _ = go("r", *BF16, "--steps=3")
    before = {path.name: path.read_bytes() for path in folder.glob("ckpt*")}
    for flags, says in ((["--steps=3", "--lr=0.5"], "lr=0.004"), (["--steps=4"], f"--init_from={folder}")):
        said = go("r", *BF16, *flags, code=2)[1]
        assert says in said and "overwrite" not in said
    assert before == {path.name: path.read_bytes() for path in folder.glob("ckpt*")}
    _, printed = go("r", *BF16, "--steps=3")                # finished: it is evaluated again
    assert "val_loss_fp4: " in printed and "left" not in printed
    _, printed = go("more", *BF16, "--steps=4", f"--init_from={folder}")
    assert f"weights of {folder}/ckpt_000000003.pt" in printed
    go("r", *BF16, "--steps=4", "--overwrite")
    assert last_state(folder)["step"] == 4 and len(rows(folder)) == 5


def test_weights_of_another_run(go, copy, tmp_path):  # noqa: F811
    """ Catches: channels, windows or a step that come along with the weights; weights that do not, or
    that have another meaning in the other block. """
    theirs = last_state(copy)["model"]
    folder, _ = go("new", *FULL, f"--init_from={copy}", "--lr=1e-30", "--weight_decay=0", "--stop_at=1")
    ours = last_state(folder)
    assert ours["step"] == 1 and (ours["model"]["blocks.0.mlp.up.channels"] == -1).all()
    assert not any("osci_" in name for name in ours["model"])
    assert torch.equal(ours["model"]["head.weight"], theirs["head.weight"])
    assert "does not fit this model" in go("wide", "--d_ff=64", f"--init_from={copy}", code=2)[1]
    assert "attn.q_norm.weight is [48]" in go("llama", "--block=llama", f"--init_from={copy}", code=2)[1]


def test_overwrite_leaves_what_is_not_the_run_s(go, shards, tmp_path):  # noqa: F811
    """
    Catches: a folder that is removed as a whole, notes and all; old weights deleted by a command that then
    fails over its data or over what it should start from.
    """
    folder, _ = go("r", *BF16, "--steps=3")
    (folder / "notes.md").write_text("what I saw")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    bad = Path(shutil.copytree(shards, tmp_path / "bad"))
    data.write_shard(bad / "a_val_000000.bin", np.arange(10, dtype=np.uint16))
    assert "10 tokens" in go("r", *BF16, "--overwrite", f"--data={bad}", code=2)[1]
    data.write_shard(bad / "a_val_000000.bin", np.array([1] * 999 + [60_000], dtype=np.uint16))
    assert "id 60000" in go("r", *BF16, "--overwrite", f"--data={bad}", code=2)[1]
    assert "holds no checkpoint" in go("r", *BF16, "--overwrite", "--init_from=nowhere", code=2)[1]
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}
    go("r", *BF16, "--steps=2", "--overwrite")
    assert (folder / "notes.md").exists() and [p.name for p in folder.glob("ckpt_*")] == ["ckpt_000000002.pt"]
    assert len(rows(folder)) == 3 and "step 3" not in (folder / "log.txt").read_text()


def test_two_processes_cannot_share_a_folder(go):  # noqa: F811
    """ Catches: the same command typed twice, whose two processes would write each other's checkpoints. """
    fcntl = pytest.importorskip("fcntl")
    folder, _ = go("r", *BF16, "--stop_at=3")
    with open(folder / "log.txt", "a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        for flags in (BF16, [*BF16, "--overwrite"]):
            assert "another process" in go("r", *flags, code=2)[1]
    assert list(folder.glob("ckpt_*.pt"))
    go("r", *BF16)


def test_a_folder_that_cannot_be_made_is_one_line(go, tmp_path):  # noqa: F811
    (tmp_path / "file").write_text("")
    assert f"{tmp_path}/file" in go("r", f"--out={tmp_path / 'file'}", code=2)[1]


def test_stopping_where_the_run_already_stands_is_said(go, copy):  # noqa: F811
    assert "larger --stop_at" in go("r", *FULL, "--stop_at=10", code=2)[1]


def test_a_knob_added_since_does_not_end_old_runs(go, copy):  # noqa: F811
    """ Catches: "a knob is one line" that makes every unfinished run unusable. """
    change(copy / "ckpt_000000010.pt", lambda state: state["config"].pop("norm_eps"))   # it has its default
    assert "continuing from" in go("r", *FULL, "--stop_at=11")[1]


# -----------------------------------------------------------------------------
# the same data, the same code


def test_data_that_moved_is_the_same_data(go, copy, shards, tmp_path):  # noqa: F811
    """ Catches: a run that cannot go on because its data lies elsewhere, or is spelt with a / at its end. """
    shutil.copytree(shards, tmp_path / "moved")
    assert "continuing from" in go("r", *FULL, f"--data={tmp_path}/moved/", "--stop_at=11")[1]


@pytest.mark.parametrize("name", ["a_train_000001.bin", "a_val_000000.bin"])
def test_other_data_under_a_resumed_run_is_noticed(go, copy, shards, tmp_path, name):  # noqa: F811
    """ Catches: tokens of the same number in another order, after which batches mean something else. """
    other = Path(shutil.copytree(shards, tmp_path / "other"))
    tokens = np.array(data.open_shard(other / name))
    data.write_shard(other / name, tokens[::-1].copy())
    assert "the run began with other data" in go("r", *FULL, f"--data={other}", code=2)[1]


def test_the_fingerprint_sees_every_token(shards, tmp_path):  # noqa: F811
    """ Catches: windows that leave the ends of a small corpus out. """
    other = Path(shutil.copytree(shards, tmp_path / "other"))
    path, before = other / "a_train_000001.bin", fingerprint(data.open_corpus(str(shards)))
    tokens = np.array(data.open_shard(path))
    for at in (0, 1, len(tokens) // 2, len(tokens) - 1):
        tokens[at] ^= 1
        data.write_shard(path, tokens)
        assert fingerprint(data.open_corpus(str(other))) != before, at
        tokens[at] ^= 1


def test_a_recipe_that_was_edited_is_noticed(go, copy, monkeypatch):  # noqa: F811
    """ Catches: two halves of a run with different rounding, under one name. """
    monkeypatch.setattr(train, "build", partial(train.build, recipe=only(RECIPES["tetrajet_full"], [1, 2])))
    assert "the recipe tetrajet_full has changed since" in go("r", *FULL, code=2)[1]


def test_other_code_under_a_resumed_run_is_noticed(go, copy, monkeypatch):  # noqa: F811
    """ Catches: a rounding rule edited between two halves of a run that passes for one. """
    assert "note: code" not in go("r", *FULL, "--stop_at=11")[1]
    monkeypatch.setattr(checkpoint, "code", lambda: "abc1234+00c0ffee")
    monkeypatch.setattr(train, "code", lambda: "abc1234+00c0ffee")
    _, printed = go("r", *FULL, "--stop_at=12")
    assert "wrote that and code abc1234+00c0ffee goes on; its recipe is the same" in printed

    def mine(blocks, op, noise):
        return quant.round_blocks(blocks, op, noise, up=True)
    dict.__setitem__(RULES, "up", Rule(mine))
    try:
        assert "goes on; rule up of the recipe changed" in go("r", *FULL, "--stop_at=13")[1]
    finally:
        dict.__setitem__(RULES, "up", Rule(partial(quant.round_blocks, up=True)))


def test_sources_tell_functions_apart():
    """ Catches: a partial function told by the function alone: nearest and up are one with two arguments. """
    told = sources(RECIPES["tetrajet_full"])
    assert told["rule nearest"] != told["rule up"] and {"signs fresh"} < set(told)
    assert {"around rotate 32 none", "around trust", "signs fixed"} <= {
        *sources(RECIPES["quartet"]), *sources(RECIPES["nvidia"])}


def test_code_is_all_that_a_run_imports(monkeypatch, tmp_path):
    """ Catches: an edit of a rival's rule under a run that names the same code. """
    (tmp_path / "rivals").mkdir()
    monkeypatch.setattr(checkpoint, "__file__", str(tmp_path / "checkpoint.py"))
    told = set()
    for path, text in (("a.py", "1"), ("a.py", "2"), ("rivals/b.py", "1"), ("rivals/b.py", "2")):
        (tmp_path / path).write_text(text)
        told.add(checkpoint.code.__wrapped__())
    assert len(told) == 4


def test_the_config_is_saved_as_a_whole(half, tmp_path):
    """ Catches: a knob that config.json forgets, so that nobody can tell what ran. """
    saved = json.loads((half / "config.json").read_text())
    assert saved["recipe"] == "tetrajet_full" and saved["stop_at"] == 10
    assert set(saved) == set(vars(parse([])))
    run = Run(parse([f"--out={tmp_path}", "--name=q"]), ("step", "lr"))
    run.row({"step": 3, "lr": 1 / 3})
    run.log.close()
    assert (tmp_path / "q" / "metrics.csv").read_text() == "3,0.333333\n"
