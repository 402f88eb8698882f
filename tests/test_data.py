""" data.py: what is served, what is refused and in which words, and what is never half written. """
import bz2
import gzip
import hashlib
import json
import lzma
import os
import subprocess
import sys
import tracemalloc
import types
from pathlib import Path

import numpy as np
import pytest

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


def complaint(capsys, *argv):
    """ The one line that a faulty command has to end with, and with exit code 2. """
    capsys.readouterr()
    try:
        assert data.main([*map(str, argv)]) == 2
    except SystemExit as end:           # argparse, which prints how the command is used before that line
        assert end.code == 2
        return capsys.readouterr().err.splitlines()[-1]
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and len(err) < 1000
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
    (lambda p: p.write_bytes(p.read_bytes()[:-2]), "1,622 bytes, and its header, with 300 tokens"),
    (lambda p: p.write_bytes(p.read_bytes() + b"\0\0"), "1,626 bytes"),
    (lambda p: p.write_bytes(p.read_bytes()[:1000]), "1,000 bytes"),
    (lambda p: p.write_bytes(p.read_bytes()[:1024]), "1,024 bytes"),
    (lambda p: p.write_bytes(b""), "not a token shard"),
    (lambda p: p.write_text("<html>Please log in</html>" * 50), "not a token shard"),
    (break_header(0, 20240521), "not a token shard (magic 20240521, version 1)"),
    (break_header(1, 7), "not a token shard (magic 20240520, version 7)"),
    (break_header(2, 0), "with 0 tokens"),
    (break_header(2, -300), "with -300 tokens"),
], ids=range(10))
def test_a_bad_shard_is_named(folder, change, words):
    """ Catches each missing check of a shard, which else means training on garbage, or a traceback; and a
    message that does not say which file. """
    path = folder / "fineweb_train_000002.bin"
    write_shard(path, u16(*range(300)))             # 1,624 bytes
    change(path)
    text = refusal(open_corpus, str(folder))
    assert text.startswith(str(path)) and words in text and "data.py" in text


def test_folders_that_cannot_be_opened(tmp_path, folder):
    """ Catches a missing folder or file told as a bare IndexError or FileNotFoundError, and no way out. """
    new = tmp_path / "my data"
    assert f"{new}: No such file" in refusal(open_corpus, str(new))
    new.mkdir()
    assert "no train shards, NAME_train_NUMBER.bin" in refusal(open_corpus, str(new))
    (new / "a.txt").write_text("text")
    assert "Not a directory" in refusal(open_corpus, str(new / "a.txt"))
    assert "File name too long" in refusal(open_corpus, "x" * 300)
    (folder / "fineweb_val_000000.bin").unlink()
    assert "no val shards" in refusal(open_corpus, str(folder))


def test_a_file_is_in_one_set_only(tmp_path):
    """ Catches globs under which a name with both words is trained on and held out, so that val is a lie. """
    for name in ("my_val_corpus_train_1.bin", "my_train_corpus_val_1.bin"):
        write_shard(tmp_path / name, u16(1, 2, 3))
    corpus = open_corpus(str(tmp_path))
    assert [p.name for p in corpus.train.paths] == ["my_val_corpus_train_1.bin"]
    assert [p.name for p in corpus.val.paths] == ["my_train_corpus_val_1.bin"]


def test_what_is_no_shard_by_its_name_is_passed_by(folder):
    """ Catches macOS's ._ files taken for shards, and copies that are counted twice. """
    whole = (folder / "fineweb_train_000001.bin").read_bytes()
    (folder / "._fineweb_train_000001.bin").write_bytes(b"\0\5\x16\7" * 100)
    for name in ("fineweb_train_000001 (1).bin", "Copy of fineweb_train_000001.bin", "train.bin",
                 "fineweb_train_000001.bin.part"):
        (folder / name).write_bytes(whole)
    assert open_corpus(str(folder)).train.n_tokens == 400


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no named pipes")
@pytest.mark.parametrize("name", ["fineweb_val_000001.bin", "fineweb_train_000003.bin", "meta.json"])
@pytest.mark.parametrize("make", [os.mkdir, getattr(os, "mkfifo", None), lambda p: os.symlink("nowhere", p)])
def test_what_is_no_regular_file_is_not_opened(folder, name, make):
    """ Catches a run that waits for ever for what a named pipe may bring, a shard that is lost without a word
    since its link leads nowhere, and a meta.json that cannot be read taken for none. """
    make(folder / name)
    assert refusal(open_corpus, str(folder)).startswith(str(folder / name))


@pytest.mark.parametrize("meta", [b"", b"{", b"[]", b"{}", b'"gpt2"', b'{"encoding": "gpt5"}',
                                  b'{"encoding": ["gpt2"]}', b"\xff\xfe", b"[" * 100_000])
def test_a_bad_meta_is_not_taken_for_gpt2(folder, meta):
    """ Catches a fall-back to GPT-2's ids where meta.json is damaged or names an unknown encoding, and a
    vocabulary that needs the network to be counted. """
    assert open_corpus(str(folder)).vocab_size == 50_257
    (folder / "meta.json").write_text('{"encoding": "cl100k_base"}')
    assert open_corpus(str(folder)).vocab_size == 100_277
    (folder / "meta.json").write_bytes(meta)
    text = refusal(open_corpus, str(folder))
    assert text.startswith(str(folder / "meta.json")) and len(text) < 500


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
                seen.add(tuple(data.permutation(seed, epoch, block, 30)))
    assert len(seen) == len(seeds) * 16
    # as SeedSequence([5, 1]) and SeedSequence(2**32 + 5) are the same
    assert tuple(data.permutation(5, 1, 0, 30)) != tuple(data.permutation(2**32 + 5, 0, 0, 30))


def test_the_order_of_a_seed_stays_what_it_was():
    """ Catches another order of the data under the same seed: runs could not be compared with older ones. """
    first = stream(1107).sequences(0, 18, 64, 1, 7)[:, 0] // 64
    assert first.tolist() == [5, 3, 4, 6, 1, 2, 0, 8, 12, 10, 11, 13, 7, 9, 17, 15, 16, 14]
    assert (stream(1107).sequences(18 * 5 + 2, 3, 64, 2**33, 7)[:, 0] // 64).tolist() == [3, 6, 4]


def test_the_stream_is_the_same_however_it_is_cut():
    """ Catches state that moves with each call, so that resuming in epoch 2 repeats or skips data; and order
    that depends on how many ranks and micro-steps there are. """
    s = stream(100, 7, 1000)
    whole = s.sequences(0, 60, 64, 1, 7)                        # 3 epochs and a third
    for cut in (1, 7, 13, 59):
        parts = [s.sequences(i, min(cut, 60 - i), 64, 1, 7) for i in reversed(range(0, 60, cut))]
        assert [row for part in reversed(parts) for row in part.tolist()] == whole.tolist()
    assert stream(100, 7, 1000).sequences(41, 3, 64, 1, 7).tolist() == whole[41:44].tolist()
    assert s.sequences(10**12, 1, 64, 1, 7).shape == (1, 65) and s.sequences(0, 0, 64, 1, 7).shape == (0, 65)


def test_whole_windows_count_no_token_twice():
    """ Catches a validation loss over a window that wraps round. """
    for n, whole in ((65, 1), (128, 1), (129, 2), (1107, 17)):
        s = stream(n)
        assert s.whole_windows(64) == whole
        x = s.sequences(0, whole, 64, 0, 0)[:, 1:].flatten().tolist()
        assert len(set(x)) == len(x)


def test_unigram_entropy():
    """ Catches bits for nats, and a limit that counts tokens it did not read. """
    s = Stream([(Path("a"), u16(*[0, 1, 2, 3] * 25)), (Path("b"), u16(*[5] * 300))], "bytes")
    assert s.unigram_entropy(100) == pytest.approx(np.log(4))
    assert s.unigram_entropy() == pytest.approx(np.log(16) / 4 + np.log(4 / 3) * 3 / 4)


# -----------------------------------------------------------------------------
# encodings and the default data


def test_without_tiktoken(monkeypatch):
    """ Catches a traceback at the end of a run, where its sample is to be decoded. """
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    for name in ("bytes", "gpt2"):
        assert "pip install tiktoken" in refusal(data.load_encoding, name)


def test_bytes_go_both_ways():
    """ Catches a pattern that drops newlines or rare characters, and text taken for a special token. """
    e = data.load_encoding("bytes")
    text = "naïve 東京 🙂\r\n\t \x00<|endoftext|>" + "x" * 1000
    assert e.encode_ordinary(text) == list(text.encode()) and e.decode(e.encode_ordinary(text)) == text
    assert e.n_vocab == data.VOCAB_SIZE["bytes"] and e.eot_token == 256
    assert e.decode([256, 104]) == "<|endoftext|>h"


@pytest.mark.parametrize("fault", [OSError("no route\nto host"), ValueError("Hash mismatch")])
def test_no_network_is_told_in_one_line(monkeypatch, folder, capsys, fault):
    """ Catches a wall of a traceback, when tokenizing and when a sample is drawn, and a corpus that needs the
    vocabulary in order to be trained on. """
    def get_encoding(name):
        raise fault
    monkeypatch.setattr("tiktoken.get_encoding", get_encoding)
    corpus = open_corpus(str(folder))
    corpus.train.sequences(0, 1, 64, 0, 0)
    text = refusal(lambda: corpus.encoding)
    assert "TIKTOKEN_CACHE_DIR" in text and "--encoding=bytes" in text and "gpt2" in text
    (folder / "a.txt").write_text("text")
    assert complaint(capsys, "text", folder / "a.txt", f"--out={folder / 'new'}") == f"error: {text}\n"
    assert not (folder / "new").exists()


def documents_of(s):
    """ The documents of a one-shard byte stream, as bytes. """
    ids = s.shards[0]
    starts = np.flatnonzero(ids == 256)
    assert starts[0] == 0                       # the end-of-text id opens a document
    return [part[1:].astype(np.uint8).tobytes() for part in np.split(ids, starts[1:])]


def test_the_default_data_is_split_by_whole_documents():
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
    topics = {text for _, text in data.python_topics()}
    kinds = [text in topics for text in train]
    assert sum(a != b for a, b in zip(kinds, kinds[1:])) > len(topics)
    # English in bytes; a table of numbers or binary junk is outside
    assert 2.8 < corpus.val.unigram_entropy() < 3.5


def test_a_topic_within_another_is_left_out(monkeypatch):
    """ Catches held-out text that stands in a longer topic of the training text. """
    made_of = {"part": "b", "whole": "abcdefgh", "half known": "ax", "fifth known": "aklmn", "other": "y"}
    topics = {name: "\n\n".join(letter * 100 for letter in letters) for name, letters in made_of.items()}
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", types.SimpleNamespace(topics=topics))
    assert data.python_topics() == [(f"topic {name}", topics[name].encode())
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
    assert data.python_sources() == [("prose.py", b"# some words in a row\n"), ("code.py", b"x = 1\n"),
                                     ("pkg/a.py", b"x = 1\n")]


def test_the_default_data_is_the_same_in_each_process():
    """ Catches Python's salted hash(), and the file system's order of files: a resumed run reads others. """
    code = ("import data, hashlib; c = data.open_corpus('');"
            "print(*(hashlib.sha256(s.shards[0].tobytes()).hexdigest() for s in (c.train, c.val)))")
    env = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(Path(data.__file__).parent)}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True, cwd="/")
    corpus = open_corpus("")
    assert out.stdout.decode().split() == [hashlib.sha256(s.shards[0].tobytes()).hexdigest()
                                           for s in (corpus.train, corpus.val)]


def test_python_without_sources(monkeypatch):
    """ Catches data that need .py files, which a zipped or frozen Python lacks, and an empty corpus. """
    monkeypatch.setattr(data, "python_sources", lambda: [])
    assert open_corpus("").train.n_tokens > data.PYTHON_LEAST
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)         # an import of it now fails
    assert "--data=DIR" in refusal(open_corpus, "")


# -----------------------------------------------------------------------------
# FineWeb: huggingface_hub is played by a function


@pytest.fixture
def hub(monkeypatch):
    """ The calls that reach hf_hub_download, which writes a shard, or raises hub.fault. """
    def download(repo, name, repo_type, local_dir, force_download):
        module.calls.append((name, force_download))
        assert (repo, repo_type) == ("kjj0/fineweb10B-gpt2", "dataset")
        if module.fault:
            raise module.fault
        local_dir.mkdir(parents=True, exist_ok=True)
        write_shard(local_dir / name, u16(*range(200)))
    module = types.SimpleNamespace(hf_hub_download=download, calls=[], fault=None)
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return module


def test_fineweb_is_fetched_once(hub, tmp_path, capsys):
    """ Catches wrong file names, whole shards that are fetched again, and damaged ones that are kept. """
    out = tmp_path / "new" / "folder"
    command = ["fineweb10B", "--shards=2", f"--out={out}"]
    names = ["fineweb_val_000000.bin", "fineweb_train_000001.bin", "fineweb_train_000002.bin"]
    assert data.main(command) == 0
    assert hub.calls == [(name, False) for name in names]
    assert "400 training tokens, 200 held out, encoding gpt2" in capsys.readouterr().out
    hub.calls.clear()
    (out / names[2]).write_bytes((out / names[2]).read_bytes()[:-2])
    assert data.main(command) == 0 and hub.calls == [(names[2], True)]
    assert open_corpus(str(out)).train.n_tokens == 400


def test_faults_of_fetching_are_one_line(hub, tmp_path, capsys, monkeypatch):
    """ Catches a traceback of the library's, its guess told for the cause, a missing package, and FineWeb in
    the folder of another text, whose ids may be others: none is out of range, all are wrong. """
    command = ["fineweb10B", "--shards=1", f"--out={tmp_path}"]
    hub.fault = RuntimeError("please check your connection")
    hub.fault.__cause__ = ValueError("Server error '503 Service Unavailable' for url\nand ten lines more")
    told = complaint(capsys, *command)
    assert "000.bin: Server error '503 Service Unavailable' for url (ValueError); once" in told
    for shards in (0, -1, 104):
        assert "1 to 103" in complaint(capsys, "fineweb10B", f"--shards={shards}", f"--out={tmp_path}")
    hub.calls.clear()
    (tmp_path / "meta.json").write_text('{"encoding": "cl100k_base"}')
    assert "holds a meta.json" in complaint(capsys, *command) and not hub.calls
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "pip install huggingface_hub" in complaint(capsys, *command)


def test_ctrl_c_is_one_line(hub, tmp_path, capsys):
    """ Catches a traceback, and Ctrl-C told as a fault of the network. """
    hub.fault = KeyboardInterrupt()
    assert data.main(["fineweb10B", "--shards=1", f"--out={tmp_path}"]) == 130
    err = capsys.readouterr().err.strip()
    assert "same command" in err and "\n" not in err


# -----------------------------------------------------------------------------
# tokenizing


def text_command(tmp_path, *args, encoding="bytes", out="out"):
    """ Run the command in-process; the corpus it made, or its exit code. """
    code = data.main(["text", *map(str, args), f"--out={tmp_path / out}", f"--encoding={encoding}"])
    return code or open_corpus(str(tmp_path / out))


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
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.txt", "out"]


@pytest.mark.parametrize("piece", [1, 3, 64, 1 << 20])
def test_pieces_are_seamless(tmp_path, monkeypatch, piece):
    """ Catches a long line that is cut off, a lost last line without a newline, a byte-order mark that gets
    into the text, and newlines that are translated. """
    monkeypatch.setattr(data, "PIECE", piece)
    text = "é🙂" * 100 + "\r\n\n東" + "\n" * 5 + "\r" + "x" * 300 + "\nend"
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


def test_records_are_documents(tmp_path):
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


def test_records_by_any_name(tmp_path):
    """ Catches one text document of JSON where the ending is spelt otherwise, and noise made of a .gz. """
    write_jsonl(tmp_path / "a.jsonl", ["one", "two", "three"])
    raw = (tmp_path / "a.jsonl").read_bytes()
    for name in ("b.JSONL", "c.ndjson", "d.json", "e.jsonl.gz", "f.json.GZ"):
        (tmp_path / name).write_bytes(gzip.compress(raw) if name.lower().endswith(".gz") else raw)
        assert list(data.pieces(tmp_path / name)) == [(True, "one"), (True, "two"), (True, "three")]
    (tmp_path / "packed.txt").write_bytes(gzip.compress(b"text"))       # told by its first bytes
    assert list(data.pieces(tmp_path / "packed.txt")) == [(True, "text")]


@pytest.mark.parametrize("spoil", (lambda raw: raw[:-9], lambda raw: raw[:20] + b"XXXX" + raw[24:],
                                   lambda raw: raw[:2], lambda raw: raw[:2] + b"XXXX"))
def test_a_damaged_gz_is_told(tmp_path, capsys, spoil):
    """ Catches a traceback, and a line that blames the folder that is written. """
    raw = gzip.compress(b"one line of text\n" * 3000)
    (tmp_path / "a.txt.gz").write_bytes(spoil(raw))
    told = complaint(capsys, "text", tmp_path / "a.txt.gz", f"--out={tmp_path / 'out'}", "--encoding=bytes")
    assert "a.txt.gz: damaged or incomplete (" in told and "get it again" in told


@pytest.mark.parametrize("end", ["\n", ""])
@pytest.mark.parametrize("piece", [20, 1 << 20])
def test_typed_ends_of_text_split_documents(tmp_path, monkeypatch, capsys, piece, end):
    """
    Catches marks that become text, as between the tales of TinyStories, where they were 24% of all; those
    too that lie across two pieces of a line without end.
    """
    monkeypatch.setattr(data, "PIECE", piece)
    tales = [f"A tale,{end}number {i}.{end}" for i in range(40)]
    (tmp_path / "tales.txt").write_text("<|endoftext|>".join(["", *tales, ""]))
    corpus = text_command(tmp_path, tmp_path / "tales.txt", "--val=0.2")
    ids = np.array(ids_of(corpus.train) + ids_of(corpus.val))
    found = [bytes(part[1:].tolist()).decode() for part in np.split(ids, np.flatnonzero(ids == 256))[1:]]
    assert sorted(found) == sorted(tales) and "40 documents in " in capsys.readouterr().out


def test_the_split_is_stable(tmp_path):
    """ Catches a split by position or salted hash: with a file more, held-out text moves into training. """
    write_jsonl(tmp_path / "a.jsonl", map(str, range(500)))
    write_jsonl(tmp_path / "b.jsonl", [f"other {i}" for i in range(500)])
    first = documents_of(text_command(tmp_path, tmp_path / "a.jsonl", "--val=0.1").val)
    # as `printf 18 | b2sum -l 64` has it: the first two digits are below 0.1 * 256
    assert first[:5] == [b"18", b"29", b"47", b"55", b"66"]
    corpus = text_command(tmp_path, tmp_path / "b.jsonl", tmp_path / "a.jsonl", "--val=0.1", out="both")
    assert set(first) <= set(documents_of(corpus.val)) and not set(first) & set(documents_of(corpus.train))


def test_a_large_vocabulary_is_stored_in_32_bits(tmp_path, monkeypatch):
    """ Catches uint16 for every vocabulary: ids beyond 65535 wrap in silence. """
    import tiktoken
    big = tiktoken.Encoding("big", pat_str=r"(?s:.)", special_tokens={"<|endoftext|>": 70_000},
                            mergeable_ranks={bytes([i]): i + 69_000 for i in range(256)})
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: big)
    (tmp_path / "a.txt").write_text("ab" * 200)
    corpus = text_command(tmp_path, tmp_path / "a.txt", encoding="cl100k_base")
    assert ids_of(corpus.train)[:3] == [70_000, 69_097, 69_098]
    assert corpus.train.sequences(0, 1, 2, 0, 0).tolist() == [[70_000, 69_097, 69_098]]


@pytest.mark.parametrize("name, content, words", [
    ("a.txt", b"good\nbad \xff\n", ":2: not UTF-8; if it is text, convert it"),
    ("a.txt", b"good\n\xf0\x9f\x99", ":2: not UTF-8"),
    ("a.txt", "naïve".encode("cp1252"), ":1: not UTF-8; if it is text, convert it, by iconv -f ENCODING"),
    ("a.txt", "good".encode("utf-16"), "by iconv -f utf-16 -t utf-8"),
    ("a.txt", "good".encode("utf-16-le"), "by iconv -f utf-16le -t utf-8"),
    ("a.jsonl", '{"text": "a"}'.encode("utf-16-be"), "by iconv -f utf-16be -t utf-8"),
    ("a.txt.gz", gzip.compress("good".encode("utf-32-be")), "by iconv -f utf-32be -t utf-8"),
    ("a.txt", b"good, but\0", "NUL"),
    ("a.parquet", b"PAR1" + bytes(range(256)), "not text but Parquet"),
    ("a.jsonl.zst", b"\x28\xb5\x2f\xfd" + bytes(range(256)), "not text but zstd: type unzstd"),
    ("a.txt.bz2", bz2.compress(b"good"), "not text but bzip2: type bunzip2"),
    ("a.txt.xz", lzma.compress(b"good"), "not text but xz: type unxz"),
    ("a.zip", b"PK\3\4" + bytes(range(256)), "not text but zip: type unzip"),
    ("._a.txt", b"\0\5\x16\7" * 20, "macOS's notes: leave it out"),
    ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', ":2: not UTF-8"),
    ("a.jsonl", b'{"text": "a"}\n\n{"text": \n', ":3: no record"),
    ("a.jsonl", b'{"text": "a"}\n{"txt": "b"}\n', ":2: no record"),
    ("a.jsonl", b'{"text": null}\n', ":1: no record"),
    ("a.jsonl", b'["text"]\n', ":1: no record"),
    ("a.jsonl", b"[" * 100_000, ":1: no record"),
    ("a.json", b'[{"text": "a"}]\n', ":1: no record"),
    ("a.txt", b"", "0 tokens"),
    ("a.txt", b"abc", "4 tokens altogether are too few"),
    ("a.jsonl", b'\n{"text": ""}\n', "0 tokens"),
], ids=range(24))
def test_bad_input_is_located(tmp_path, capsys, name, content, words):
    """ Catches a traceback, a wrong line number, replacement characters in the corpus, and half a folder. """
    (tmp_path / name).write_bytes(content)
    told = complaint(capsys, "text", tmp_path / name, f"--out={tmp_path / 'out'}", "--encoding=bytes")
    assert told.startswith(f"error: {tmp_path / name}") and words in told
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_bad_arguments(tmp_path, capsys):
    """ Catches hours of tokenizing before the second file turns out to be missing, and misspelt flags. """
    good = tmp_path / "a.txt"
    good.write_text("text" * 100)
    out = f"--out={tmp_path / 'out'}"
    assert f"{tmp_path}: no regular file" in complaint(capsys, "text", good, tmp_path, out)
    assert "b.txt: no regular file" in complaint(capsys, "text", good, tmp_path / "b.txt", out)
    for flag in ("--val=0", "--val=0.6", "--val=nan", "--shard_tokens=0", "--shard_tokens=2_147_483_648",
                 "--vall=0.1", "--shard_token=5", "--val=x", "--encoding=gpt5"):
        assert flag.partition("=")[0] in complaint(capsys, "text", good, out, flag)
    for argv in ([], ["fineweb"], ["fineweb10B"], ["fineweb10B", "--shard=1"], ["text", out]):
        complaint(capsys, *argv)
    assert os.listdir(tmp_path) == ["a.txt"]


def test_what_is_there_is_left_alone(tmp_path, capsys):
    """ Catches shards that are overwritten, or mixed with others, and a file in the place of the folder. """
    (tmp_path / "a.txt").write_text("text" * 100)
    (tmp_path / "empty").mkdir()
    assert text_command(tmp_path, tmp_path / "a.txt", out="empty").train.n_tokens > 300
    before = {p: p.read_bytes() for p in (tmp_path / "empty").iterdir()}
    for out in ("empty", "a.txt", "."):
        told = complaint(capsys, "text", tmp_path / "a.txt", f"--out={tmp_path / out}", "--encoding=bytes")
        assert "there already" in told
    told = complaint(capsys, "text", tmp_path / "a.txt", f"--out={tmp_path}/a.txt/b", "--encoding=bytes")
    assert "a.txt" in told
    assert {p: p.read_bytes() for p in (tmp_path / "empty").iterdir()} == before
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "empty"]


def test_an_empty_folder_gives_way_before_the_work(tmp_path, capsys, monkeypatch):
    """ Catches hours of tokenizing that are lost in the end, where a link leads to an empty folder, such as
    on another disk, or where the folder is a mount point, which cannot be replaced. """
    (tmp_path / "a.txt").write_text("text" * 100)
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    assert text_command(tmp_path, tmp_path / "a.txt", out="link").train.n_tokens > 300
    (tmp_path / "mount").mkdir()
    monkeypatch.setattr(Path, "rmdir", lambda path: os.rmdir(tmp_path / "a.txt"))      # fails
    monkeypatch.setattr(data, "write_ids", None)
    told = complaint(capsys, "text", tmp_path / "a.txt", f"--out={tmp_path / 'mount'}", "--encoding=bytes")
    assert "name another --out" in told and sorted(os.listdir(tmp_path)) == ["a.txt", "disk", "link", "mount"]


def test_one_command_at_a_time_fills_a_folder(tmp_path, capsys):
    """ Catches a folder with the shards of two texts, and one that a killed command left unnamed. """
    (tmp_path / "a.txt").write_text("text" * 100)
    with data.new_folder(tmp_path / "out") as making:
        told = complaint(capsys, "text", tmp_path / "a.txt", f"--out={tmp_path / 'out'}", "--encoding=bytes")
        assert str(making) in told and making.is_dir() and not (tmp_path / "out").exists()
    assert (tmp_path / "out").is_dir() and not making.exists()


@pytest.mark.parametrize("fault, code", [(OSError(28, "No space left on device"), 2),
                                         (KeyboardInterrupt(), 130)])
def test_a_failure_leaves_nothing(tmp_path, capsys, monkeypatch, fault, code):
    """ Catches half a folder under the name that was asked for, and temporary files left behind. """
    def fail(*args):
        raise fault
    (tmp_path / "a.txt").write_text("text" * 100)
    monkeypatch.setattr(data, "write_shard", fail)
    assert text_command(tmp_path, tmp_path / "a.txt") == code
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and (code != 2 or f"{tmp_path / 'out'}: No space left on device" in err)
    assert os.listdir(tmp_path) == ["a.txt"]


def test_memory_is_bounded(tmp_path, monkeypatch):
    """ Catches a file that is read whole, or ids that are gathered before they are written: a 10 GB file has
    to work. Here the text is 3 MB, and its ids in a list would be 24 MB. """
    monkeypatch.setattr(data, "PIECE", 1 << 14)
    (tmp_path / "a.txt").write_text("a line of text\n" * 200_000)
    (tmp_path / "b.txt").write_text("a line of text\n" * 20)
    text_command(tmp_path, tmp_path / "b.txt", out="first")         # warm: imports and caches
    tracemalloc.start()
    try:
        text_command(tmp_path, tmp_path / "a.txt", "--shard_tokens=100_000")
        assert tracemalloc.get_traced_memory()[1] < 2e6
    finally:
        tracemalloc.stop()
