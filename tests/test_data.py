""" data.py: what is served, what is refused and in which words, what a hostile or broken server can do. """
import contextlib
import hashlib
import http.server
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
import types
from pathlib import Path

import numpy as np
import pytest
import requests
import tiktoken

import data
from data import DataError, Stream, open_corpus, open_shard, write_shard


def u16(*ids):
    return np.array(ids, dtype=np.uint16)


def stream(*lengths):
    """ Shards of these lengths whose tokens count on from 0, so that a token tells where it stood. """
    tokens = np.arange(sum(lengths), dtype=np.uint16)
    return Stream([(Path("shard"), part) for part in np.split(tokens, np.cumsum(lengths)[:-1])], "gpt2")


def expected(n_tokens, window, seq_len):
    return [(window * seq_len + i) % n_tokens for i in range(seq_len + 1)]


@pytest.fixture
def folder(tmp_path):
    """ A good folder of shards: two to train on, one held out. """
    write_shard(tmp_path / "fineweb_train_000001.bin", u16(*range(300)))
    write_shard(tmp_path / "fineweb_train_000002.bin", u16(*range(300, 400)))
    write_shard(tmp_path / "fineweb_val_000000.bin", u16(*range(200)))
    return tmp_path


def refusal(call, *args):
    """ The text of the DataError that call(*args) has to raise. Catches a text of several lines. """
    with pytest.raises(DataError) as e:
        call(*args)
    assert "\n" not in str(e.value) and len(str(e.value)) > 20
    return str(e.value)


def exit_code(argv):
    """ What main ends with; a Ctrl-C that gets out of it fails the test, where it would end pytest. """
    try:
        return data.main(argv)
    except SystemExit as e:
        return e.code
    except KeyboardInterrupt:
        return "KeyboardInterrupt"


def complaint(capsys, *argv):
    """ The one line that a faulty command has to end with, and with exit code 2. """
    capsys.readouterr()
    assert exit_code([*map(str, argv)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and err.strip("\n").isprintable()
    assert len(err) < 1000
    return err


# -----------------------------------------------------------------------------
# shards


@pytest.mark.parametrize("ids, start", [(u16(0, 1, 65_535), (20240520, 1)),
                                        (np.array([65_536, 200_018], np.uint32), (20240801, 7))])
def test_a_shard_reads_back(tmp_path, ids, start):
    """ Catches a wrong magic or header length, and ids beyond 65535 that wrap, stored in 16 bits. """
    path = tmp_path / "a_train_1.bin"
    write_shard(path, ids)
    raw = path.read_bytes()
    assert np.frombuffer(raw, "<i4", 256).tolist() == [*start, len(ids)] + [0] * 253
    assert len(raw) == 1024 + ids.nbytes
    back = open_shard(path)
    assert back.dtype == ids.dtype and back.tolist() == ids.tolist() and isinstance(back, np.memmap)


def break_header(index, value):
    def change(path):
        raw = np.fromfile(path, dtype="<i4", count=256)
        raw[index] = value
        path.write_bytes(raw.tobytes() + path.read_bytes()[1024:])
    return change


@pytest.mark.parametrize("change, words", [
    (lambda p: p.write_bytes(p.read_bytes()[:-2]), "truncated, 1,622 bytes where its header says 1,624"),
    (lambda p: p.write_bytes(p.read_bytes() + b"\0\0"), "too long, 1,626 bytes where its header says 1,624"),
    (lambda p: p.write_bytes(p.read_bytes()[:1000]), "truncated inside its header"),
    (lambda p: p.write_bytes(b""), "truncated inside its header"),
    (lambda p: p.write_text("<html>Please log in</html>" * 50), "not a token shard"),
    (break_header(0, 20240521), "not a token shard (magic 20240521, version 1)"),
    (break_header(1, 7), "not a token shard (magic 20240520, version 7)"),
    (break_header(2, 0), "holds no tokens"),
    (break_header(2, -300), "holds no tokens"),
    (lambda p: (p.unlink(), p.mkdir()), "Is a directory"),
], ids=range(10))
def test_a_bad_shard_is_named_with_its_mend(folder, change, words):
    """ Catches each missing check of a shard, which else means training on garbage, or a traceback; a message
    that does not say which file; and a mend that would leave just this shard out. """
    path = folder / "fineweb_train_000002.bin"
    write_shard(path, u16(*range(300)))             # 1,624 bytes
    change(path)
    text = refusal(open_corpus, str(folder))
    assert text.startswith(str(path)) and words in text
    assert text.endswith(f"python data.py fineweb10B --shards=2 --out={folder}")


def test_the_mend_of_the_held_out_shard(folder):
    """ Catches --shards=0, from its number, which is refused: it comes with any number of others. """
    (folder / "fineweb_val_000000.bin").write_bytes(b"")
    assert refusal(open_corpus, str(folder)).endswith(f"python data.py fineweb10B --shards=1 --out={folder}")


def test_folders_that_cannot_be_opened(tmp_path, folder):
    """ Catches a missing folder or file told as a bare IndexError or FileNotFoundError, and no way out. """
    empty = tmp_path / "my data"
    text = refusal(open_corpus, str(empty))
    assert "no such folder" in text and f"--out='{empty}'" in text      # quoted, as it has a blank
    empty.mkdir()
    text = refusal(open_corpus, str(empty))
    assert "no shards" in text and "data.py fineweb10B" in text
    assert text.endswith(f"python data.py text FILES --out='{empty}'")
    (empty / "a.txt").write_text("text")
    assert "data.py text" in refusal(open_corpus, str(empty / "a.txt"))
    (folder / "fineweb_val_000000.bin").unlink()
    assert "no val shard" in refusal(open_corpus, str(folder))
    assert refusal(open_corpus, str(folder)).endswith(f"python data.py fineweb10B --shards=1 --out={folder}")
    for path in folder.glob("*_train_*"):
        path.rename(folder / path.name.replace("train", "val"))
    assert "no train shard" in refusal(open_corpus, str(folder))


@pytest.mark.parametrize("path, words", [("~nosuch/x", "home folder"), ("x" * 300, "File name too long")])
def test_paths_that_cannot_be(path, words, capsys):
    """ Catches pathlib's own RuntimeError and OSError, with a traceback, for a mistyped --data or --out. """
    assert words in refusal(open_corpus, path)
    assert words in complaint(capsys, "fineweb10B", "--shards=1", f"--out={path}", "--url=http://127.0.0.1:9")


def test_home_is_where_a_run_looks_for_it(tmp_path, monkeypatch):
    """ Catches --out=~/x, which bash leaves as it is, written to a folder named ~ that no run reads. """
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("text" * 100)
    assert data.main(["text", "a.txt", "--out=~/x", "--encoding=bytes"]) == 0
    assert (tmp_path / "x").is_dir() and open_corpus("~/x").train.n_tokens > 300


def test_more_shards_than_files_may_be_open(folder):
    """ Catches advice to allow reading a file, or to make it again, where the limit of open files is met. """
    for number in range(3, 60):
        shutil.copy(folder / "fineweb_train_000001.bin", folder / f"fineweb_train_{number:06d}.bin")
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 20, limits[1]))
    try:
        text = refusal(open_corpus, str(folder))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert text.startswith(str(folder / "fineweb_train_0000")) and "Too many open files" in text
    assert "ulimit -n" in text and "--shard_tokens" in text and "allow reading" not in text


def test_a_file_is_in_one_set_only(tmp_path):
    """ Catches globs under which a name with both words is trained on and held out, so that val is a lie. """
    for name in ("my_val_corpus_train_1.bin", "my_train_corpus_val_1.bin"):
        write_shard(tmp_path / name, u16(1, 2, 3))
    corpus = open_corpus(str(tmp_path))
    assert [p.name for p in corpus.train.paths] == ["my_val_corpus_train_1.bin"]
    assert [p.name for p in corpus.val.paths] == ["my_train_corpus_val_1.bin"]


@pytest.mark.parametrize("meta", [b"", b"{", b"[]", b"{}", b'"gpt2"', b'{"encoding": "gpt5"}',
                                  b'{"encoding": ["gpt2"]}', b"\xff\xfe", b"[" * 60_000, b"[" * 200_000,
                                  b'{"encoding": "%s"}' % (b"x" * 60_000),
                                  b'{"encoding": "gpt2"}' + b" " * 70_000],
                         ids=range(12))
def test_a_bad_meta_is_not_taken_for_gpt2(folder, meta):
    """ Catches a fall-back to GPT-2's ids where meta.json is damaged or names an unknown encoding, a parser
    that recurses too deep, and a message or a file of any length. """
    (folder / "meta.json").write_bytes(meta)
    text = refusal(open_corpus, str(folder))
    assert text.startswith(str(folder / "meta.json")) and len(text) < 500


def test_meta_names_the_encoding(folder):
    """ Catches a vocabulary that is always GPT-2's, and one that needs the network to be counted. """
    assert open_corpus(str(folder)).vocab_size == 50_257
    (folder / "meta.json").write_text('{"encoding": "cl100k_base"}')
    assert open_corpus(str(folder)).vocab_size == 100_277


def test_ids_beyond_the_vocabulary_are_located(folder):
    """ Catches a check that runs on the first shard only, and a position that is counted from the window. """
    path = folder / "fineweb_train_000002.bin"
    ids = u16(*range(100))
    ids[77] = 50_257
    write_shard(path, ids)
    train = open_corpus(str(folder)).train
    assert train.sequences(0, 4, 64, 0, 0).shape == (4, 65)        # the bad id is beyond these
    text = refusal(train.sequences, 5, 1, 64, 0, 0)
    assert text.startswith(f"{path}: id 50257 at position 77 ") and "meta.json" in text
    assert "position 77 " in refusal(train.unigram_entropy)     # the check before a run
    train.unigram_entropy(limit=377)
    ids[77] = 50_256
    write_shard(path, ids)
    train.sequences(5, 1, 64, 0, 0)


# -----------------------------------------------------------------------------
# sequences


@pytest.mark.parametrize("lengths", [(100, 7, 1000), (1, 1, 1, 70), (7, 1100), (128, 64)])
@pytest.mark.parametrize("seq_len", [1, 8, 64])
def test_windows_tile_an_epoch_and_lose_no_token(lengths, seq_len):
    """ Catches what the ends of shards do to a loader: a tail that is dropped, a window that ends with its
    shard, a shard shorter than a window (7 tokens) that hangs or is skipped, a lost last window. """
    s, n = stream(*lengths), sum(lengths)
    assert s.windows(seq_len) == int(np.ceil(n / seq_len))
    x = s.sequences(0, s.windows(seq_len), seq_len, 0, 0)
    assert x.dtype.is_signed and x.element_size() == 8
    assert x.tolist() == [expected(n, w, seq_len) for w in range(s.windows(seq_len))]
    # every token is an input once, and once a target, but for what the wrap repeats
    assert x[:, :-1].flatten()[:n].tolist() == list(range(n))
    assert x[:, 1:].flatten()[:n].tolist() == [*range(1, n), 0]


def test_too_few_tokens_for_a_sequence(folder):
    """ Catches an off-by-one about the extra token, and windows that wrap onto themselves without a word. """
    assert stream(64, 1).sequences(0, 1, 64, 0, 0).tolist() == [[*range(65)]]
    s = open_corpus(str(folder)).val
    s.windows(199)
    for method in (s.windows, s.whole_windows):
        text = refusal(method, 200)
        assert "200 tokens" in text and "201" in text and "seq_len" in text and str(folder) in text
    refusal(s.sequences, 0, 1, 200, 0, 0)


@pytest.mark.parametrize("shuffle", [1, 2, 5, 18, 1000])
def test_shuffling_permutes_each_block(shuffle):
    """ Catches an order that repeats or loses windows, that leaves its block, or that never changes. """
    s, n = stream(100, 7, 1000), 18                             # 1107 tokens, so 18 windows of 64
    orders = []
    for epoch in range(3):
        x = s.sequences(epoch * n, n, 64, 3, shuffle)
        order = [row[0] // 64 for row in x.tolist()]
        assert x.tolist() == [expected(1107, w, 64) for w in order]
        for begin in range(0, n, shuffle):
            block = order[begin : begin + shuffle]
            assert sorted(block) == [*range(begin, min(begin + shuffle, n))]
        orders.append(order)
    if shuffle > 1:
        assert orders[0] != orders[1] != orders[2] != orders[0]
        assert orders[0] != [row[0] // 64 for row in s.sequences(0, n, 64, 4, shuffle).tolist()]


def test_blocks_differ_from_each_other():
    """ Catches one permutation that serves every block, so that order is periodic. """
    order = stream(6400).sequences(0, 100, 64, 0, 50)[:, 0] // 64
    assert order[:50].tolist() != (order[50:] - 50).tolist()


def test_seeds_do_not_collide():
    """ Catches seed + epoch and [seed, epoch, block], under which one run's order returns in another run. """
    seeds, seen = [0, 1, 2, 3, 1337, 1338, 2**32, 2**32 + 1, 2**33 + 1], set()
    for seed in seeds:
        for epoch in range(4):
            for block in range(4):
                seen.add(tuple(data._permutation(seed, epoch, block, 30)))
    assert len(seen) == len(seeds) * 16
    # as SeedSequence([5, 1]) and SeedSequence(2**32 + 5) are the same
    assert tuple(data._permutation(5, 1, 0, 30)) != tuple(data._permutation(2**32 + 5, 0, 0, 30))


def test_the_stream_is_the_same_however_it_is_cut():
    """ Catches state that moves with each call, so that resuming in epoch 2 repeats or skips data. """
    s = stream(100, 7, 1000)
    whole = s.sequences(0, 60, 64, 1, 7)                        # 3 epochs and a third
    for cut in (1, 7, 13, 59):
        pieces = [s.sequences(i, min(cut, 60 - i), 64, 1, 7) for i in reversed(range(0, 60, cut))]
        assert [row for piece in reversed(pieces) for row in piece.tolist()] == whole.tolist()
    assert stream(100, 7, 1000).sequences(41, 3, 64, 1, 7).tolist() == whole[41:44].tolist()
    assert s.sequences(10**12, 1, 64, 1, 7).shape == (1, 65) and s.sequences(0, 0, 64, 1, 7).shape == (0, 65)


@pytest.mark.parametrize("ranks, micro_steps", [(1, 1), (1, 8), (2, 4), (4, 2), (4, 1)])
def test_all_rank_counts_see_one_global_batch(ranks, micro_steps):
    """ Catches order that depends on how many GPUs there are, and ranks that share data. """
    s, per_step = stream(3000), 8
    count = per_step // (ranks * micro_steps)
    for step in range(3):
        rows = []
        for micro in range(micro_steps):
            for rank in range(ranks):
                first = step * per_step + (micro * ranks + rank) * count
                rows += s.sequences(first, count, 32, 9, 16).tolist()
        assert rows == s.sequences(step * per_step, per_step, 32, 9, 16).tolist()
        assert len({row[0] for row in rows}) == per_step


def test_whole_windows_and_epochs():
    """ Catches a validation loss that counts tokens twice, and a wrong notice of repeated data. """
    for n, whole in ((64, 0), (65, 1), (128, 1), (129, 2), (1107, 17)):
        if whole:
            s = stream(n)
            assert s.whole_windows(64) == whole
            x = s.sequences(0, whole, 64, 0, 0)[:, 1:].flatten().tolist()
            assert len(set(x)) == len(x)
    s = stream(1107)
    assert s.epochs(18, 64) == 1 and s.epochs(27, 64) == 1.5


def test_unigram_entropy():
    """ Catches bits for nats, and a limit that counts tokens it did not read. """
    s = Stream([(Path("a"), u16(*[0, 1, 2, 3] * 25)), (Path("b"), u16(*[5] * 300))], "bytes")
    assert s.unigram_entropy(100) == pytest.approx(np.log(4))
    assert s.unigram_entropy() == pytest.approx(np.log(16) / 4 + np.log(4 / 3) * 3 / 4)


def test_reading_is_fast():
    """ Catches a permutation that is computed anew for each sequence: 20 s here, against 0.05. """
    s = stream(60_000)
    begin = time.perf_counter()
    s.sequences(0, 5000, 1, 0, 50_000)
    assert time.perf_counter() - begin < 2


# -----------------------------------------------------------------------------
# encodings and the embedded corpus


def test_without_tiktoken(monkeypatch):
    """ Catches: a traceback at the end of a run, where its sample is to be decoded. """
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    for name in ("bytes", "gpt2"):
        with pytest.raises(DataError, match="pip install tiktoken"):
            data.load_encoding(name)


def test_bytes_go_both_ways():
    """ Catches a pattern that drops newlines or rare characters, and text taken for a special token. """
    e = data.load_encoding("bytes")
    text = "naïve 東京 🙂\r\n\t \x00<|endoftext|>" + "x" * 1000
    assert e.encode_ordinary(text) == list(text.encode()) and e.decode(e.encode_ordinary(text)) == text
    assert e.n_vocab == data.VOCAB_SIZE["bytes"] and e.eot_token == 256
    assert e.decode([256, 104]) == "<|endoftext|>h"


@pytest.mark.parametrize("fault", [requests.exceptions.ConnectionError("a\nb"), OSError("no route"),
                                   requests.exceptions.HTTPError("403"), ValueError("Hash mismatch")])
def test_no_network_is_told_in_one_line(monkeypatch, folder, capsys, fault):
    """ Catches a wall of a traceback, when tokenizing and when a sample is drawn, and a corpus that needs the
    vocabulary in order to be trained on. """
    def get_encoding(name):
        raise fault
    monkeypatch.setattr(tiktoken, "get_encoding", get_encoding)
    corpus = open_corpus(str(folder))
    corpus.train.sequences(0, 1, 64, 0, 0)
    text = refusal(lambda: corpus.encoding)
    assert "TIKTOKEN_CACHE_DIR" in text and "--encoding=bytes" in text and "gpt2" in text
    (folder / "a.txt").write_text("text")
    assert data.main(["text", str(folder / "a.txt"), f"--out={folder / 'new'}"]) == 2
    assert capsys.readouterr().err == f"error: {text}\n" and not (folder / "new").exists()


def documents_of(s):
    """ The documents of a one-shard byte stream, as bytes. """
    ids = s.shards[0]
    starts = np.flatnonzero(ids == 256)
    assert starts[0] == 0                       # the end-of-text id opens a document
    return [part[1:].astype(np.uint8).tobytes() for part in np.split(ids, starts[1:])]


def test_embedded_corpus_splits_whole_documents():
    """ Catches a document, or a language topic that is a section of another, on both sides of the split. """
    corpus = open_corpus("")
    train, val = documents_of(corpus.train), documents_of(corpus.val)
    assert 100 < len(train) and 5 < len(val) < len(train) / 8 and not set(train) & set(val)
    assert data.PYTHON_LEAST < corpus.train.n_tokens + corpus.val.n_tokens < data.PYTHON_BYTES + 10_000
    long = [{p for text in side for p in text.split(b"\n\n") if len(p) > 300} for side in (train, val)]
    assert len(long[0] & long[1]) < 0.05 * len(long[1])
    assert corpus.vocab_size == 257 and max(corpus.train.shards[0].max(), corpus.val.shards[0].max()) == 256
    assert "python-3" in corpus.describe() and f"{corpus.val.n_tokens:,}" in corpus.describe()
    # topics and sources alternate from beginning to end, for a run that reads them in order
    topics = {text for _, text in data._python_topics()}
    kinds = [text in topics for text in train]
    assert sum(a != b for a, b in zip(kinds, kinds[1:])) > len(topics)
    # English in bytes; a table of numbers or binary junk is outside
    assert 2.8 < corpus.val.unigram_entropy() < 3.5


def test_a_topic_within_another_is_left_out(monkeypatch):
    """ Catches held-out text that stands in a longer topic of the training text. """
    made_of = {"part": "b", "whole": "abcdefgh", "half known": "ax", "fifth known": "aklmn", "other": "y"}
    topics = {name: "\n\n".join(letter * 100 for letter in letters) for name, letters in made_of.items()}
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", types.SimpleNamespace(topics=topics))
    assert data._python_topics() == [(f"topic {name}", topics[name].encode())
                                     for name in ("whole", "fifth known", "other")]


def test_which_sources_are_read(tmp_path, monkeypatch):
    """ Catches packages that happen to be installed, paths of this machine, tests, and Windows' line ends:
    two users of one Python version should train on one text. """
    names = ["code.py", "prose.py", "pkg/a.py", "test/b.py", "pkg/tests/c.py", "site-packages/d.py", "a.txt",
             "config-3.11/e.py", "_sysconfigdata_x.py", "sitecustomize.py"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"# some words in a row\r\n" if name == "prose.py" else b"x = 1\r\n")
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert data._python_sources() == [("prose.py", b"# some words in a row\n"), ("code.py", b"x = 1\n"),
                                      ("pkg/a.py", b"x = 1\n")]


def test_embedded_corpus_is_the_same_in_each_process():
    """ Catches Python's salted hash(), and the file system's order of files: a resumed run reads others. """
    def digests(corpus):
        return [hashlib.sha256(s.shards[0].tobytes()).hexdigest() for s in (corpus.train, corpus.val)]
    corpus = open_corpus("")
    assert digests(open_corpus("")) == digests(corpus)
    code = ("import data, hashlib; c = data.open_corpus('');"
            "print(*(hashlib.sha256(s.shards[0].tobytes()).hexdigest() for s in (c.train, c.val)))")
    env = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(Path(data.__file__).parent)}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True, cwd="/")
    assert out.stdout.decode().split() == digests(corpus)


def test_python_without_sources(monkeypatch):
    """ Catches a corpus that needs .py files, which a zipped or frozen Python lacks, and an empty one. """
    monkeypatch.setattr(data, "_python_sources", lambda: [])
    assert open_corpus("").train.n_tokens > data.PYTHON_LEAST
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)         # an import of it now fails
    assert "data.py fineweb10B" in refusal(open_corpus, "")
    monkeypatch.undo()
    monkeypatch.setattr("sysconfig.get_path", lambda name: "/nonexistent")
    assert data._python_sources() == []


# -----------------------------------------------------------------------------
# fetching, from a server on this machine that does as each test scripts

def shard_bytes(n_tokens, announced=None):
    header = np.array([20240520, 1, n_tokens if announced is None else announced] + [0] * 253, dtype="<i4")
    return header.tobytes() + np.arange(n_tokens, dtype="<u2").tobytes()


SHARD = shard_bytes(40_000)


def whole(h, body=SHARD, cut=None, length=None, ranges=True, pause=0):
    """ Answer with the body as a web server does, from Range's start on; send only `cut` bytes, if given. """
    start = int(h.headers["Range"][6:-1]) if ranges and "Range" in h.headers else 0
    if start >= len(body):
        return status(h, 416)
    h.send_response(206 if start else 200)
    if start:
        h.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
    h.send_header("Content-Length", str(len(body) - start if length is None else length))
    h.end_headers()
    h.wfile.write(body[start:][:cut])
    h.wfile.flush()
    time.sleep(pause)


def status(h, code, **headers):
    h.send_response(code)
    for name, value in headers.items():
        h.send_header(name, value)
    h.send_header("Content-Length", "0")
    h.end_headers()


class Script:
    """ What the server does, request by request; the last act repeats. seen: (path, Range) of each. """
    def __init__(self, *acts):
        self.acts, self.seen, self.url = list(acts), [], None


@pytest.fixture
def serve(monkeypatch):
    """ serve(act, act, ...) starts a server and returns its Script. """
    monkeypatch.setattr(data, "BACKOFF_SECONDS", 0.001)
    monkeypatch.setattr(data, "STALL_SECONDS", 0.3)
    monkeypatch.setenv("no_proxy", "*")
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            socket.create_connection(listener.getsockname(), timeout=5).close()
    except OSError as e:
        pytest.skip(f"needs 127.0.0.1: {e}")
    servers = []

    def start(*acts):
        script = Script(*acts)

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                script.seen.append((self.path, self.headers["Range"]))
                act = script.acts.pop(0) if len(script.acts) > 1 else script.acts[0]
                with contextlib.suppress(ConnectionError):
                    act(self)

            def log_message(self, *args):
                pass
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        script.url = f"http://127.0.0.1:{server.server_port}"
        return script
    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def part_of(path):
    return path.with_name(path.name + ".part")


def assert_fetched(path):
    assert path.read_bytes() == SHARD and not part_of(path).exists()


BROKEN = {
    "cut off": lambda h: whole(h, cut=30_000),
    "cut off in the header": lambda h: whole(h, cut=500),
    "stalled": lambda h: whole(h, cut=30_000, pause=3),
    "busy": lambda h: status(h, 503),
    "too many requests": lambda h: status(h, 429),
    "closed at once": lambda h: None,
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_transfer_is_resumed(serve, tmp_path, fault):
    """ Catches a truncated shard that is kept, a stall that hangs for ever, and a retry that starts over: if
    30,000 bytes came, the second request has to ask for the rest. """
    script, path = serve(BROKEN[fault], whole), tmp_path / "a.bin"
    begin = time.perf_counter()
    data._download(f"{script.url}/a", path)
    assert time.perf_counter() - begin < 2.5
    assert_fetched(path)
    resumes = fault in ("cut off", "stalled")
    assert script.seen == [("/a", None), ("/a", "bytes=30000-" if resumes else None)]


def test_progress_renews_patience(serve, tmp_path):
    """ Catches retries counted over the whole shard: a bad line breaks off more often than that. """
    script, path = serve(lambda h: whole(h, cut=5_000)), tmp_path / "a.bin"
    data._download(script.url, path)
    assert_fetched(path)
    assert len(script.seen) == 17


@pytest.mark.parametrize("act, kept", [(BROKEN["busy"], 0),
                                       (lambda h: whole(h, cut=30_000, ranges=False), 30_000)])
def test_patience_ends(serve, tmp_path, act, kept):
    """ Catches endless retries, also of a server that ignores Range and always breaks off at one place. """
    script, path = serve(act), tmp_path / "a.bin"
    text = refusal(data._download, script.url, path)
    assert script.url in text and f"{kept:,} bytes" in text and not path.exists()
    assert len(script.seen) == 1 + data.RETRIES


def test_a_server_may_ignore_range(serve, tmp_path):
    """ Catches the whole file appended to the part: too long, and wrong after the seam. """
    script, path = serve(lambda h: whole(h, cut=30_000), lambda h: whole(h, ranges=False)), tmp_path / "a.bin"
    data._download(script.url, path)
    assert_fetched(path)


def test_a_206_from_elsewhere_is_not_appended(serve, tmp_path):
    """ Catches a Content-Range that nobody reads: these bytes belong at 10,000 and would land at 30,000. """
    def elsewhere(h):
        h.send_response(206)
        h.send_header("Content-Range", f"bytes 10000-{len(SHARD) - 1}/{len(SHARD)}")
        h.send_header("Content-Length", str(len(SHARD) - 30_000))
        h.end_headers()
        h.wfile.write(SHARD[10_000:][:len(SHARD) - 30_000])
    script, path = serve(elsewhere), tmp_path / "a.bin"
    part_of(path).write_bytes(SHARD[:30_000])
    assert "not a token shard" in refusal(data._download, script.url, path)
    assert not path.exists()


def test_a_206_from_the_start_is_not_appended_to_junk(serve, tmp_path):
    """ Catches a part that is appended to because the answer is a 206, though nothing of it was kept. """
    def act(h):
        h.send_response(206)
        h.send_header("Content-Range", f"bytes 0-{len(SHARD) - 1}/{len(SHARD)}")
        h.end_headers()
        h.wfile.write(SHARD)
    script, path = serve(act), tmp_path / "a.bin"
    part_of(path).write_bytes(b"junk")
    data._download(script.url, path)
    assert_fetched(path)


def test_a_complete_part_needs_no_request(serve, tmp_path):
    """ Catches a 416 that is told as a fault, when the program was only stopped before the renaming. """
    script, path = serve(whole), tmp_path / "a.bin"
    part_of(path).write_bytes(SHARD)
    data._download(script.url, path)
    assert_fetched(path)
    assert script.seen == []


@pytest.mark.parametrize("leftover, first_range", [
    (b"junk" * 1000, None), (SHARD[:700], None), (shard_bytes(9_000)[:15_000], "bytes=15000-"),
    (SHARD + b"tail", "bytes=81028-"), (shard_bytes(50_000, announced=10**6), "bytes=101024-"),
], ids=["junk", "short", "another shard", "too long", "beyond the end: 416"])
def test_a_part_of_something_else_is_dropped(serve, tmp_path, leftover, first_range):
    """ Catches a leftover that is built upon, or on which every later run fails in the same way. """
    script, path = serve(whole), tmp_path / "a.bin"
    part_of(path).write_bytes(leftover)
    data._download(script.url, path)
    assert_fetched(path)
    assert script.seen[0][1] == first_range


@pytest.mark.parametrize("code", [400, 401, 403, 404, 410])
def test_a_final_answer_is_not_asked_again(serve, tmp_path, code):
    """ Catches retries of a missing file, and a part that is thrown away because of a mistyped --url. """
    script, path = serve(lambda h: status(h, code)), tmp_path / "a.bin"
    part_of(path).write_bytes(SHARD[:30_000])
    text = refusal(data._download, f"{script.url}/a", path)
    assert f"{script.url}/a" in text and str(code) in text and "--url" in text
    assert len(script.seen) == 1 and part_of(path).stat().st_size == 30_000


def endless(h):
    """ A shard, then zeros for as long as somebody listens, with no length announced. """
    h.send_response(200)
    h.end_headers()
    h.wfile.write(SHARD)
    h.server.sent = 0
    for _ in range(2000):
        h.server.sent += h.wfile.write(bytes(1 << 16))


@pytest.mark.parametrize("act, words", [
    (endless, "goes on after the 81,024 bytes"),
    (lambda h: whole(h, SHARD + b"tail"), "announces 81028 bytes, the shard's header 81024"),
    (lambda h: whole(h, SHARD[:-10]), "announces 81014 bytes, the shard's header 81024"),
    (lambda h: whole(h, b"<html>log in to this network</html>" * 100), "not a token shard"),
    (lambda h: whole(h, shard_bytes(0)), "no tokens"),
    (lambda h: whole(h, shard_bytes(10, announced=2**31 - 1), length=1022 + 2**32), "header 4294968318"),
], ids=["endless", "longer", "shorter", "web page", "empty", "huge"])
def test_what_is_no_shard_is_refused_at_once(serve, tmp_path, act, words):
    """ Catches a download that fills the disk, and what is no shard under a shard's name. """
    script, path = serve(act), tmp_path / "a.bin"
    text = refusal(data._download, script.url, path)
    assert words in text and script.url in text
    assert len(script.seen) == 1 and list(tmp_path.iterdir()) == []


def test_what_lies_beyond_is_not_read(serve, tmp_path):
    """ Catches a client that reads on to the end of what it will refuse: this server has 131 MB to give. """
    sent = []

    def act(h):
        try:
            endless(h)
        finally:
            sent.append(h.server.sent)
    script = serve(act)
    refusal(data._download, script.url, tmp_path / "a.bin")
    for _ in range(200):
        time.sleep(0 if sent else 0.01)
    assert sent[0] < 30e6           # what the sockets' buffers hold


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://a/b", "data:,x", "//a/b", "a", "", "http://",
                                 "http:///x", "https://a b", "http://[::1", "http://localhost/é",
                                 "http://./x", "http://a..b", f"http://{'a' * 70}/", "http://a:x",
                                 "http://a:99999", "http://a/\x7f"])
def test_only_the_web_is_asked(tmp_path, capsys, url):
    """ Catches urllib's other schemes: a file of this machine would be taken for a download. And tracebacks
    of what it says of addresses that cannot be. """
    text = complaint(capsys, "fineweb10B", "--shards=1", f"--url={url}", f"--out={tmp_path / 'new'}")
    assert text.startswith("error: --url=" + url.strip("\x7f") + ": not an http or https address")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("url", ["HTTP://127.0.0.1", "Https://a.example.:443/b", "http://[::1]:80/b?c=%20d"])
def test_addresses_of_any_spelling(url):
    """ Catches a scheme that only counts in small letters, and a check that refuses what urllib can ask. """
    assert data._is_web(url)


@pytest.mark.parametrize("target", ["ftp://127.0.0.1:1/x", "file:///etc/passwd", "/", "http://[::1",
                                    "http://./x"])
def test_bad_redirects(serve, tmp_path, target):
    """ Catches a redirect off the web that is followed, urllib's four lines about one in a circle, and its
    ValueError about one that is no address. """
    script = serve(lambda h: status(h, 302, Location=target))
    assert script.url in refusal(data._download, script.url, tmp_path / "a.bin")
    assert list(tmp_path.iterdir()) == []


def test_redirects_on_the_web(serve, tmp_path):
    """ Catches a redirect that loses Range: Hugging Face redirects every file. """
    final, path = serve(whole), tmp_path / "a.bin"
    script = serve(lambda h: status(h, 302, Location=f"{final.url}/b"))
    part_of(path).write_bytes(SHARD[:30_000])
    data._download(f"{script.url.upper()}/a", path)             # HTTP leads to http: no less safe
    assert_fetched(path)
    assert final.seen == [("/b", "bytes=30000-")]


@pytest.mark.parametrize("start, end", [("https://a/b", "http://a/b"), ("http://a/b", "ftp://a/b")])
def test_a_safe_address_does_not_lead_to_a_less_safe_one(tmp_path, monkeypatch, start, end):
    """ Catches a redirect from https to http, or to ftp, where anybody on the way can change the bytes. """
    response = contextlib.nullcontext()
    response.url = end
    monkeypatch.setattr(data.urllib.request, "urlopen", lambda *args, **kwargs: response)
    assert end in refusal(data._download, start, tmp_path / "a.bin")


def test_a_message_is_one_line_whatever_the_server_says(serve, tmp_path, capsys):
    """ Catches control characters of a status line that get to the terminal. """
    def act(h):
        h.wfile.write(b"HTP/1.1 \x1b[2J\x1b]0;x\x07\r\n\r\n")
    script = serve(act)
    assert data.main(["fineweb10B", "--shards=1", f"--url={script.url}", f"--out={tmp_path}"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.strip("\n").isprintable()


def test_fineweb_command(serve, tmp_path, capsys):
    """ Catches wrong file names, whole shards that are fetched again, and damaged ones that are kept. """
    script, out = serve(whole), tmp_path / "new" / "folder"
    command = ["fineweb10B", "--shards=2", f"--out={out}", f"--url={script.url}/main/"]
    assert data.main(command) == 0
    names = ["fineweb_val_000000.bin", "fineweb_train_000001.bin", "fineweb_train_000002.bin"]
    assert [path for path, _ in script.seen] == [f"/main/{name}" for name in names]
    assert sorted(p.name for p in out.iterdir()) == sorted(names)
    assert "80,000 training tokens, 40,000 held out" in capsys.readouterr().out

    script.seen.clear()
    (out / names[2]).write_bytes(SHARD[:-2])
    assert data.main(command) == 0
    assert [path for path, _ in script.seen] == [f"/main/{names[2]}"]
    said = capsys.readouterr().out
    assert said.count("already here") == 2 and "truncated" in said and "fetching it again" in said
    assert_fetched(out / names[2])


@pytest.mark.parametrize("shards", ["0", "-1", "104"])
def test_fineweb_command_knows_how_many_there_are(tmp_path, capsys, shards):
    """ Catches a run of 404s, or a folder with nothing to train on. """
    assert data.main(["fineweb10B", f"--shards={shards}", f"--out={tmp_path}"]) == 2
    assert "1 to 103" in capsys.readouterr().err


def test_fineweb_is_not_mixed_with_another_encoding(tmp_path, capsys):
    """ Catches GPT-2 ids beside a meta.json that says cl100k_base: no id is out of range, all are wrong. """
    (tmp_path / "meta.json").write_text('{"encoding": "cl100k_base"}')
    assert data.main(["fineweb10B", "--shards=1", f"--out={tmp_path}", "--url=http://127.0.0.1:9"]) == 2
    assert "cl100k_base" in capsys.readouterr().err


def test_ctrl_c_leaves_a_part_to_go_on_from(serve, tmp_path, capsys, monkeypatch):
    """ Catches a traceback, and a clean-up that throws away what was fetched. """
    def stop(text):
        if text:            # not to clear the line, after another fault
            raise KeyboardInterrupt
    script = serve(lambda h: whole(h, cut=30_000, pause=0.2), whole)
    command = ["fineweb10B", "--shards=1", f"--out={tmp_path}", f"--url={script.url}"]
    with monkeypatch.context() as m:
        m.setattr(data, "_progress", stop)
        assert exit_code(command) == 130
    err = capsys.readouterr().err.strip()
    assert "same command" in err and "\n" not in err
    size = part_of(tmp_path / "fineweb_val_000000.bin").stat().st_size
    assert size > 1024 and data.main(command) == 0
    assert script.seen[1] == ("/fineweb_val_000000.bin", f"bytes={size}-")


def test_a_full_disk_is_not_taken_for_the_network(serve, tmp_path, capsys, monkeypatch):
    """ Catches OSErrors of every kind being retried, and a traceback at the end. """
    def full(*args):
        raise OSError(28, "No space left on device")
    script = serve(whole)
    monkeypatch.setattr(data, "_receive", full)
    assert data.main(["fineweb10B", "--shards=1", f"--out={tmp_path}", f"--url={script.url}"]) == 2
    assert "No space left" in capsys.readouterr().err and len(script.seen) == 1


# -----------------------------------------------------------------------------
# tokenizing


def text_command(tmp_path, *args, encoding="bytes"):
    """ Run the command in-process; the corpus it made, or its exit code. """
    code = data.main(["text", *map(str, args), f"--out={tmp_path / 'out'}", f"--encoding={encoding}"])
    return code or open_corpus(str(tmp_path / "out"))


def ids_of(s):
    return np.concatenate(s.shards).tolist()


def test_a_single_text_is_split_near_its_end(tmp_path):
    """ Catches a val that is nothing or everything if there is one document, and lost or doubled text. """
    text = "".join(f"line {i} of naïve 🙂 text\n" for i in range(500))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    corpus = text_command(tmp_path, tmp_path / "a.txt", "--val=0.1")
    ids = ids_of(corpus.train) + ids_of(corpus.val)
    assert ids == [256, *text.encode()]
    assert corpus.val.n_tokens == round(0.1 * len(ids))
    assert json.loads((tmp_path / "out" / "meta.json").read_text()) == {"encoding": "bytes"}
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "meta.json", "text_train_000001.bin", "text_val_000000.bin"]


@pytest.mark.parametrize("piece", [1, 2, 3, 64, 1 << 20])
def test_pieces_are_seamless(tmp_path, monkeypatch, piece):
    """ Catches a piece that ends in the midst of a character, a long line that is cut off, a lost last line
    without a newline, a byte-order mark that gets into the text, and newlines that are translated. """
    monkeypatch.setattr(data, "PIECE_BYTES", piece)
    text = "é🙂" * 100 + "\r\n\n東" + "\n" * 5 + "x" * 300 + "\nend"
    (tmp_path / "a.md").write_bytes(b"\xef\xbb\xbf" + text.encode())
    corpus = text_command(tmp_path, tmp_path / "a.md")
    assert ids_of(corpus.train) + ids_of(corpus.val) == [256, *text.encode()]


def test_shards_are_cut_to_size(tmp_path):
    """ Catches a last short shard that is lost, and shards whose order is not that of their names. """
    (tmp_path / "a.txt").write_text("0123456789" * 1000)
    corpus = text_command(tmp_path, tmp_path / "a.txt", "--shard_tokens=1_000", "--val=0.2")
    assert [len(t) for t in corpus.train.shards] == [1000] * 8 + [1] and len(corpus.val.shards) == 2
    assert bytes((ids_of(corpus.train) + ids_of(corpus.val))[1:]).decode() == "0123456789" * 1000


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"id": 1, "text": t}) + "\n" for t in texts), encoding="utf-8")


def test_jsonl_lines_are_documents(tmp_path):
    """ Catches documents that are lost, cut, or not opened by the end-of-text id; copies of a document on
    both sides of the split; and text that becomes a special token. """
    texts = [f"document {i} <|endoftext|> é\n" * (i % 3) for i in range(600)]
    write_jsonl(tmp_path / "a.jsonl", texts + texts)
    (tmp_path / "a.jsonl").write_text((tmp_path / "a.jsonl").read_text() + "\n  \n")
    corpus = text_command(tmp_path, tmp_path / "a.jsonl", "--val=0.2")
    train, val = documents_of(corpus.train), documents_of(corpus.val)
    assert sorted(train + val) == sorted(t.encode() for t in texts + texts if t)
    # the first document always trains; its copy may not
    assert set(train) & set(val) <= {texts[1].encode()}
    # 400 distinct documents: 80 held out, give or take 4 standard deviations
    assert abs(len(set(val)) - 80) < 32


def test_the_split_is_stable(tmp_path):
    """ Catches a split by position or salted hash: with a file more, held-out text moves into training. """
    write_jsonl(tmp_path / "a.jsonl", map(str, range(500)))
    write_jsonl(tmp_path / "b.jsonl", [f"other {i}" for i in range(500)])
    first = documents_of(text_command(tmp_path, tmp_path / "a.jsonl", "--val=0.1").val)
    # as `printf 18 | b2sum -l 64` has it: the first two digits are below 0.1 * 256
    assert first[:5] == [b"18", b"29", b"47", b"55", b"66"]
    corpus = text_command(tmp_path, tmp_path / "b.jsonl", tmp_path / "a.jsonl", "--val=0.1", "--overwrite")
    assert set(first) <= set(documents_of(corpus.val)) and not set(first) & set(documents_of(corpus.train))


def test_a_large_vocabulary_is_stored_in_32_bits(tmp_path, monkeypatch):
    """ Catches uint16 for every vocabulary: ids beyond 65535 wrap in silence. """
    big = tiktoken.Encoding("big", pat_str=r"(?s:.)", special_tokens={"<|endoftext|>": 70_000},
                            mergeable_ranks={bytes([i]): i + 69_000 for i in range(256)})
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: big)
    monkeypatch.setitem(data.VOCAB_SIZE, "cl100k_base", 70_001)
    (tmp_path / "a.txt").write_text("ab" * 100)
    corpus = text_command(tmp_path, tmp_path / "a.txt", encoding="cl100k_base")
    assert ids_of(corpus.train)[:3] == [70_000, 69_097, 69_098]
    assert corpus.train.sequences(0, 1, 2, 0, 0).tolist() == [[70_000, 69_097, 69_098]]


@pytest.mark.parametrize("name, content, words", [
    ("a.txt", b"good\nbad \xff\n", ":2: not UTF-8"),
    ("a.txt", b"good\n\xf0\x9f\x99", ":2: not UTF-8"),
    ("a.txt", "good".encode("utf-16"), "iconv -f UTF-16"),
    ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', ":2: not UTF-8"),
    ("a.jsonl", b'{"text": "a"}\n\n{"text": \n', ":3: not JSON"),
    ("a.jsonl", b"[" * 100_000, ":1: not JSON"),
    ("a.jsonl", b'{"text": "a"}\n{"txt": "b"}\n', ':2: no "text"'),
    ("a.jsonl", b'{"text": null}\n', ':1: no "text"'),
    ("a.jsonl", b'["text"]\n', ':1: no "text"'),
    ("a.jsonl", b'"text"\n', ':1: no "text"'),
    ("a.txt", b"", "no text"),
    ("a.jsonl", b'\n{"text": ""}\n', "no text"),
], ids=range(12))
def test_bad_input_is_located(tmp_path, capsys, name, content, words):
    """ Catches a traceback, a wrong line number, replacement characters in the corpus, and half a folder. """
    (tmp_path / name).write_bytes(content)
    assert text_command(tmp_path, tmp_path / name) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {tmp_path / name}") and words in err and err.count("\n") == 1
    assert list((tmp_path / "out").iterdir()) == []


def test_bad_arguments(tmp_path, capsys):
    """ Catches hours of tokenizing before the second file turns out to be missing, misspelt flags, and shards
    that are overwritten or mixed with others unasked. """
    good = tmp_path / "a.txt"
    good.write_text("text" * 100)
    assert text_command(tmp_path, good, tmp_path / "b.txt") == 2
    assert str(tmp_path / "b.txt") in capsys.readouterr().err and not (tmp_path / "out").exists()
    out = f"--out={tmp_path / 'out'}"
    for flag in ("--val=0", "--val=0.6", "--val=nan", "--shard_tokens=0", "--shard_tokens=2_147_483_648",
                 "--shard_tokens=99999999999999999999999", "--vall=0.1", "--shard_token=5", "--val=x",
                 "--encoding=gpt5", "--a\nb"):
        assert flag.partition("=")[0].replace("\n", "") in complaint(capsys, "text", good, out, flag)
    for argv in ([], ["fineweb"], ["fineweb10B"], ["fineweb10B", "--shard=1"], ["text", "--out=x"]):
        assert "--help" in complaint(capsys, *argv)
    assert not (tmp_path / "out").exists()

    text_command(tmp_path, good, "--shard_tokens=100")
    before = sorted((tmp_path / "out").iterdir())
    capsys.readouterr()
    assert text_command(tmp_path, good) == 2
    assert "--overwrite" in capsys.readouterr().err and sorted((tmp_path / "out").iterdir()) == before
    corpus = text_command(tmp_path, good, "--overwrite")
    assert len(corpus.train.shards) == 1 and len(list((tmp_path / "out").iterdir())) == 3


def test_a_folder_that_cannot_be(tmp_path, capsys, monkeypatch):
    """ Catches "File exists" for what is in the way, and an empty --out that fills the current folder. """
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("text" * 100)
    fetch = ["fineweb10B", "--shards=1", "--url=http://127.0.0.1:9"]
    for command in (["text", "a.txt", "--encoding=bytes"], fetch):
        for out in ("a.txt", "a.txt/b/c"):
            assert "error: a.txt: a file is in the way" in complaint(capsys, *command, f"--out={out}")
        assert "--out= is empty" in complaint(capsys, *command, "--out=")
    assert os.listdir() == ["a.txt"]


@pytest.mark.parametrize("name", ["meta.json", "text_val_000000.bin", "other_train_1.bin"])
def test_a_folder_in_the_way_of_a_file(tmp_path, capsys, name):
    """ Catches shards deleted before the new ones turn out to have no place, and a deleted folder. """
    (tmp_path / "a.txt").write_text("text" * 100)
    text_command(tmp_path, tmp_path / "a.txt", "--shard_tokens=100")
    way = tmp_path / "out" / name
    way.unlink(missing_ok=True)
    way.mkdir()
    before = sorted((tmp_path / "out").rglob("*"))
    text = complaint(capsys, "text", tmp_path / "a.txt", f"--out={tmp_path / 'out'}", "--encoding=bytes",
                     "--overwrite")
    assert f"error: {way}: a folder is in the way" in text
    assert sorted((tmp_path / "out").rglob("*")) == before


@pytest.mark.parametrize("fault, code", [(OSError(13, "Permission denied"), 2), (KeyboardInterrupt(), 130)])
def test_shards_are_exchanged_all_or_none(tmp_path, capsys, monkeypatch, fault, code):
    """ Catches old shards that are gone, or mixed with new ones, when putting these into place fails. """
    (tmp_path / "a.txt").write_text("old" * 100)
    text_command(tmp_path, tmp_path / "a.txt", "--shard_tokens=100")
    before = {p: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    (tmp_path / "a.txt").write_text("new" * 50)
    command = ["text", str(tmp_path / "a.txt"), f"--out={tmp_path / 'out'}", "--overwrite",
               "--encoding=bytes"]
    replace, moves = os.replace, 0

    def fail(source, target):
        nonlocal left
        left -= 1
        if left == -1:
            raise fault
        replace(source, target)
    monkeypatch.setattr(os, "replace", fail)
    while True:
        left = moves
        if (result := exit_code(command)) == 0:
            break
        assert result == code and capsys.readouterr().err.strip("\n").count("\n") == 0
        assert {p: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before
        moves += 1
    assert moves == len(before) + 3             # these away; meta.json, train and val in
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "meta.json", "text_train_000001.bin", "text_val_000000.bin"]


def test_a_failure_leaves_the_folder_as_it_was(tmp_path, capsys, monkeypatch):
    """ Catches temporary files left behind, and old shards deleted before the new ones are there. """
    (tmp_path / "a.txt").write_text("old" * 100)
    text_command(tmp_path, tmp_path / "a.txt")
    before = {p: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    for fault, code in ((OSError(28, "No space left on device"), 2), (KeyboardInterrupt(), 130)):
        def fail(*args):
            raise fault
        monkeypatch.setattr(data, "write_shard", fail)
        assert exit_code(["text", str(tmp_path / "a.txt"), f"--out={tmp_path / 'out'}", "--overwrite",
                          "--encoding=bytes"]) == code
        told = capsys.readouterr().err
        assert code != 2 or f"{tmp_path / 'out'}: No space left on device; make room" in told
        assert {p: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before


def test_memory_is_bounded(tmp_path, monkeypatch):
    """ Catches a file that is read whole, or ids that are gathered before they are written: a 10 GB file has
    to work. Here the text is 3 MB, and its ids in a list would be 24 MB. """
    monkeypatch.setattr(data, "PIECE_BYTES", 1 << 14)
    (tmp_path / "a.txt").write_text("a line of text\n" * 200_000)
    text_command(tmp_path, tmp_path / "a.txt", "--shard_tokens=100_000")        # warm: imports and caches
    tracemalloc.start()
    try:
        text_command(tmp_path, tmp_path / "a.txt", "--shard_tokens=100_000", "--overwrite")
        assert tracemalloc.get_traced_memory()[1] < 2e6
    finally:
        tracemalloc.stop()
