"""
Token data: shards on disk, the endless stream of sequences a run reads from them, and the commands that
make them.

    python data.py fineweb10B --shards=1                    fetch 100M tokens of FineWeb
    python data.py text a.txt b.jsonl --out=data/mine       tokenize your own text
    python train.py --data=data/mine                        train on it; the default is the embedded corpus

A shard is a flat array of token ids behind a header. It is memory-mapped: a run holds only what it reads.

    | 256 x int32: magic, version, count, 0 ... | count ids ...                        all little-endian

      magic 20240520, version 1: uint16 ids, as the published FineWeb-10B shards have them
      magic 20240801, version 7: uint32 ids, llm.c's format for more than 65536 ids, so that none ever wraps

A folder of shards holds *_train_*.bin, *_val_*.bin and, unless its ids are GPT-2's, a meta.json, as
{"encoding": "bytes"}. An end-of-text id opens each document.

A batch is a pure function of (seed, number of its first sequence). Nothing is carried from step to step, so
there is no loader state to save, and one GPU or eight read the same global batch.

Left out on purpose: a prefetching thread (a batch is a few hundred small copies), attention masks between
documents, mixtures of corpora, training a tokenizer.
"""
import argparse
import codecs
import errno
import hashlib
import http.client
import json
import os
import re
import reprlib
import shlex
import shutil
import ssl
import sys
import sysconfig
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from config import ConfigError, in_full

FETCH = "python data.py fineweb10B --shards=1"      # the way out that messages name


class DataError(ValueError):
    """ A fault that the user can mend. Its text is one line: what is wrong, where, and what to do. """


# -----------------------------------------------------------------------------
# encodings

# ids in each vocabulary. A table, because tiktoken would have to load a vocabulary to tell, perhaps from the
# network, and training itself needs no more of it than this number
VOCAB_SIZE = {"bytes": 257, "gpt2": 50_257, "r50k_base": 50_257, "p50k_base": 50_281, "cl100k_base": 100_277,
              "o200k_base": 200_019}


def load_encoding(name: str):
    """
    The tiktoken.Encoding of that name. "bytes" is made here: UTF-8 bytes are ids 0 .. 255, and 256 is end of
    text. The others are tiktoken's own, which downloads a vocabulary on first use.

    errors  DataError if the vocabulary is neither on this machine nor to be downloaded
    """
    try:
        import tiktoken
    except ImportError:
        raise DataError("text needs the package tiktoken: type pip install tiktoken") from None
    if name == "bytes":
        # with no merges a piece falls apart into its bytes, so the pattern only bounds how long a piece gets
        return tiktoken.Encoding("bytes", pat_str=r"(?s:.{1,256})", special_tokens={"<|endoftext|>": 256},
                                 mergeable_ranks={bytes([i]): i for i in range(256)})
    try:
        encoding = tiktoken.get_encoding(name)
    except (OSError, ValueError) as e:      # OSError: all of requests' own; ValueError: a wrong hash
        raise DataError(f"cannot load the {name} vocabulary ({type(e).__name__}); without a network, set "
                        "TIKTOKEN_CACHE_DIR to a folder that has its files, or do without them: "
                        "--encoding=bytes, or the embedded corpus") from None
    assert encoding.n_vocab == VOCAB_SIZE[name], f"{name} has {encoding.n_vocab} ids, not {VOCAB_SIZE[name]}"
    return encoding


# -----------------------------------------------------------------------------
# shards

HEADER_BYTES = 256 * 4
FORMATS = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}      # (magic, version): ids


def write_shard(path: Path, tokens: np.ndarray) -> None:
    """ Write tokens, (n,) uint16 or uint32, which picks the format, and wait until they are on the disk. """
    magic, version = {dtype: key for key, dtype in FORMATS.items()}[tokens.dtype]
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, len(tokens)
    with open(path, "wb") as f:
        f.write(header.tobytes())
        f.write(tokens.tobytes())
        f.flush()
        os.fsync(f.fileno())


def parse_header(header: bytes) -> tuple[np.dtype, int]:
    """ The dtype of a shard's ids and the whole shard's size in bytes. DataError, without a path, if bad. """
    if len(header) < HEADER_BYTES:
        raise DataError("truncated inside its header")
    magic, version, count = np.frombuffer(header, dtype="<i4", count=3).tolist()
    if (magic, version) not in FORMATS:
        raise DataError(f"not a token shard (magic {magic}, version {version})")
    if count <= 0:
        raise DataError("holds no tokens")
    dtype = FORMATS[magic, version]
    return dtype, HEADER_BYTES + count * dtype.itemsize


def open_shard(path: Path) -> np.ndarray:
    """
    The ids of a shard, (n,) uint16 or uint32, memory-mapped.

    errors  DataError if it cannot be read, is no shard, is empty, or is not as long as its header says
    """
    try:
        with open(path, "rb") as f:
            dtype, wanted = parse_header(f.read(HEADER_BYTES))
            size = os.fstat(f.fileno()).st_size
        if size != wanted:
            fault = "truncated" if size < wanted else "too long"
            raise DataError(f"{fault}, {size:,} bytes where its header says {wanted:,}")
        return np.memmap(path, dtype=dtype, mode="r", offset=HEADER_BYTES)
    except OSError as e:
        if e.errno in (errno.EMFILE, errno.ENFILE):
            raise DataError(f"{path}: {e.strerror}, as each shard is one; raise the limit, ulimit -n 65536, "
                            "or make fewer shards, with a larger --shard_tokens") from None
        raise DataError(f"{path}: {e.strerror}; allow reading it, or make it: {_remedy(path)}") from None
    except DataError as e:
        raise DataError(f"{path}: {e}; make it again: {_remedy(path)}") from None


def _remedy(path: Path) -> str:
    """ The command that makes this shard again. """
    out = shlex.quote(str(path.parent))
    if found := re.fullmatch(r"fineweb_.*_(\d+)\.bin", path.name):
        return f"python data.py fineweb10B --shards={max(1, int(found[1]))} --out={out}"
    return f"python data.py text FILES --out={out} --overwrite"


# -----------------------------------------------------------------------------
# streams: shards laid end to end and cut into sequences

@lru_cache(maxsize=4)       # a run goes from block to block, so it never comes back to more than a few
def _permutation(seed: int, epoch: int, block: int, size: int) -> np.ndarray:
    """
    The order of one shuffle block: a permutation of range(size).

    spawn_key keeps the numbers apart. With seed + epoch, seed 1 in epoch 2 would repeat seed 2 in epoch 1;
    even in a list [seed, epoch, block], a seed beyond 2^32 spills into the epoch's place.
    """
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(epoch, block))).permutation(size)


class Stream:
    """
    Shards laid end to end as one run of tokens, and the endless sequence of windows cut from it.

    Windows of seq_len tokens tile the stream, across the ends of shards. Each is read with the next window's
    first token besides, as what follows its own last one:

        tokens    0 1 2 3 4 5 6 7 8 9               n_tokens = 10, seq_len = 4
        window 0  0 1 2 3 4
        window 1          4 5 6 7 8
        window 2                  8 9 0 1 2         the last one wraps round, so that no token is lost

    and then the next epoch begins.
    """

    def __init__(self, shards: list[tuple[Path, np.ndarray]], encoding_name: str):
        self.paths = [path for path, _ in shards]
        self.shards = [tokens for _, tokens in shards]
        self.ends = list(accumulate(map(len, self.shards)))     # of each shard, as a position in the stream
        self.n_tokens = self.ends[-1]
        self.vocab_size = VOCAB_SIZE[encoding_name]

    def windows(self, seq_len: int) -> int:
        """ Windows in an epoch. DataError if the stream is shorter than one sequence. """
        if self.n_tokens < seq_len + 1:
            raise DataError(f"{self.paths[0]}: {self.n_tokens:,} tokens in all, and a sequence has "
                            f"{seq_len + 1:,}; lower seq_len or get more data, e.g. {FETCH}; of text of your "
                            "own, data.py can hold out more: --val=0.1")
        return -(-self.n_tokens // seq_len)

    def whole_windows(self, seq_len: int) -> int:
        """ Windows in an epoch that do not wrap round: a validation loss over them counts no token twice. """
        self.windows(seq_len)
        return (self.n_tokens - 1) // seq_len

    def epochs(self, n_sequences: int, seq_len: int) -> float:
        """ How many times n_sequences sequences go through the stream. Beyond 1 the data repeats. """
        return n_sequences / self.windows(seq_len)

    def sequences(self, first: int, count: int, seq_len: int, seed: int, shuffle: int) -> Tensor:
        """
        Sequences number first .. first + count - 1 of the endless stream.

        in      first    counts over all steps, micro-steps and ranks: step * sequences_per_step + where this
                         rank's micro-step begins within its step
                shuffle  windows in a block. Order is shuffled within each block, anew in each epoch; 0 keeps
                         the order of the stream
        out     (count, seq_len + 1) int64; inputs are [:, :-1], targets [:, 1:]
        errors  DataError if the stream is shorter than one sequence, or an id is not in the vocabulary
        """
        assert min(first, count, seed, shuffle) >= 0 and seq_len >= 1, (first, count, seq_len, seed, shuffle)
        n_windows = self.windows(seq_len)
        out = np.empty((count, seq_len + 1), dtype=np.int64)
        for row in range(count):
            epoch, window = divmod(first + row, n_windows)
            if shuffle:
                block, place = divmod(window, shuffle)
                begin = block * shuffle
                size = min(shuffle, n_windows - begin)          # the last block may be short
                window = begin + int(_permutation(seed, epoch, block, size)[place])
            self._read(window * seq_len, out[row])
        return torch.from_numpy(out)

    def unigram_entropy(self, limit: int = 10_000_000) -> float:
        """
        Entropy of how often each token occurs among the first `limit`, in nats.

        It is the loss of a model that has learnt these frequencies and nothing else: the first mark to pass.
        Called before training, it is also a quick check that these tokens are in the vocabulary.

        errors  DataError if an id among them is not in the vocabulary
        """
        counts = np.zeros(self.vocab_size, dtype=np.int64)
        n_tokens, step = min(limit, self.n_tokens), 1 << 20
        for start in range(0, n_tokens, step):
            tokens = np.empty(min(step, n_tokens - start), dtype=np.int64)
            self._read(start, tokens)
            counts += np.bincount(tokens, minlength=self.vocab_size)
        p = counts[counts > 0] / n_tokens
        return float(-(p * np.log(p)).sum())

    def _read(self, start: int, out: np.ndarray) -> None:
        """ Fill out, (n,) int64, with the tokens from position start on, wrapping round at the end. """
        shard = bisect_right(self.ends, start)
        at = start - self.ends[shard] + len(self.shards[shard])         # position within the shard
        filled = 0
        while filled < len(out):
            tokens = self.shards[shard][at : at + len(out) - filled]
            # past the embedding's last row, a GPU fails without a word about where the id came from
            if tokens.max() >= self.vocab_size:
                bad, path = int(np.argmax(tokens >= self.vocab_size)), self.paths[shard]
                raise DataError(f"{path}: id {tokens[bad]} at position {at + bad:,} is beyond the vocabulary "
                                f"of {self.vocab_size:,} ids; name its encoding in a meta.json beside it, or "
                                f"make it again: {_remedy(path)}")
            out[filled : filled + len(tokens)] = tokens
            filled += len(tokens)
            shard, at = (shard + 1) % len(self.shards), 0


@dataclass(frozen=True)
class Corpus:
    """ Training tokens, held-out tokens, and the name of the encoding of both. """
    name: str
    encoding_name: str
    train: Stream
    val: Stream

    @property
    def vocab_size(self) -> int:
        """ Number of ids, end of text included, padding not. """
        return VOCAB_SIZE[self.encoding_name]

    @cached_property
    def encoding(self):
        """ The tiktoken.Encoding, loaded when first asked for, as only samples need it. """
        return load_encoding(self.encoding_name)

    def describe(self) -> str:
        """ One line for a log. """
        return (f"{self.name}: {self.train.n_tokens:,} training tokens, {self.val.n_tokens:,} held out, "
                f"encoding {self.encoding_name} with {self.vocab_size:,} ids")


def open_corpus(path: str) -> Corpus:
    """ The corpus in a folder of shards, or with "" the embedded one. DataError if it cannot be used. """
    if not path:
        return _open_python()
    try:
        return _open_folder(_expand(path))
    except OSError as e:
        raise DataError(f"{path}: {e.strerror}; allow reading it, or name another folder") from None


def _expand(path: str) -> Path:
    try:
        return in_full(path)
    except ConfigError as error:
        raise DataError(str(error)) from None


def _open_folder(folder: Path) -> Corpus:
    out = shlex.quote(str(folder))
    make = (f"fetch FineWeb into it: {FETCH} --out={out}, or tokenize your own text: "
            f"python data.py text FILES --out={out}")
    if folder.is_file():
        raise DataError(f"{folder}: a file, not a folder of shards; if it is text, tokenize it: "
                        f"python data.py text {out} --out=data/mine")
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; {make}")
    files = _shard_files(folder)
    present = files["train"] + files["val"]
    if not present:
        raise DataError(f"{folder}: no shards (*_train_*.bin, *_val_*.bin); {make}")
    for split, paths in files.items():
        if not paths:
            raise DataError(f"{folder}: no {split} shard (*_{split}_*.bin); make one: {_remedy(present[0])}")
    encoding_name = _read_meta(folder)
    train, val = (Stream([(p, open_shard(p)) for p in paths], encoding_name) for paths in files.values())
    return Corpus(folder.name, encoding_name, train, val)


def _shard_files(folder: Path) -> dict[str, list[Path]]:
    """ {"train": [...], "val": [...]}, each sorted by name. """
    files = {"train": [], "val": []}
    for path in sorted(folder.glob("*.bin")):
        # greedy, so the last of two such words decides, and no file is both
        if found := re.fullmatch(r".*_(train|val)_.*", path.name):
            files[found[1]].append(path)
    return files


META_LIMIT = 1 << 16        # bytes; a longer meta.json is something else


def _read_meta(folder: Path) -> str:
    """ The name of the encoding of a folder's shards: what meta.json says, gpt2 where there is none. """
    path = folder / "meta.json"
    try:
        with open(path, "rb") as f:
            text = f.read(META_LIMIT + 1)
        if len(text) > META_LIMIT:
            raise ValueError
        name = json.loads(text.decode())["encoding"]
    except FileNotFoundError:
        return "gpt2"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise DataError(f'{path}: unreadable; write it like {{"encoding": "gpt2"}}') from None
    if name not in [*VOCAB_SIZE]:
        known = ", ".join(VOCAB_SIZE)
        raise DataError(f"{path}: unknown encoding {reprlib.repr(name)}; write one of {known}")
    return name


# -----------------------------------------------------------------------------
# the embedded corpus: the text of the Python installation itself, which everybody who runs this file has

PYTHON_BYTES = 6_000_000        # at most, so that it opens in a fraction of a second
PYTHON_LEAST = 200_000          # with less there is nothing to learn
HELD_OUT = 20                   # one document in so many
SKIPPED = {"test", "tests", "idle_test", "idlelib", "lib2to3",      # fixtures and deliberately odd code
           "encodings", "pydoc_data",                               # tables, and the topics, taken separately
           "site-packages", "dist-packages"}                        # not Python's own


def _hash(data: bytes) -> int:
    """ 64 bits, the same in every process and on every machine, as Python's own hash() is not. """
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


def _python_topics() -> list[tuple[str, bytes]]:
    """
    The language reference in pydoc's form, (name, text) of each topic.

    Many topics are sections of longer ones ("for" is one of "compound"), and held-out text must not stand in
    the training text. So the longest go first, and one that was by over a fifth seen before is left out.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return []
    kept, seen = [], set()
    for name, text in sorted(topics.items(), key=lambda topic: (-len(topic[1]), topic[0])):
        paragraphs = [p for p in text.split("\n\n") if len(p) > 80]     # headings recur
        if sum(p in seen for p in paragraphs) <= len(paragraphs) / 5:
            kept.append((f"topic {name}", text.encode()))
            seen.update(paragraphs)
    return kept


def _python_sources() -> list[tuple[str, bytes]]:
    """ The modules of the standard library, (name, source) of each, most prose first. """
    root = Path(sysconfig.get_path("stdlib"))
    ranked = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED and not name.startswith("config-")]
        for path in (Path(folder, name) for name in files if name.endswith(".py")):
            # these were written when Python was installed, and hold the paths of that machine
            if path.is_file() and not path.name.startswith(("_sysconfigdata", "sitecustomize")):
                text = path.read_bytes().replace(b"\r\n", b"\n")
                # a blank between two words is common in docstrings and comments, rare in code and tables
                prose = len(re.findall(rb"[a-z] [a-z]", text)) / (len(text) + 1)
                ranked.append((-prose, path.relative_to(root).as_posix(), text))
    return [(name, text) for _, name, text in sorted(ranked)]


def _open_python() -> Corpus:
    """ Topics, then sources up to the cap, as bytes. They change with Python's version: the name has it. """
    documents, size = [], 0
    for name, text in _python_topics() + _python_sources():
        if size + len(text) <= PYTHON_BYTES:
            documents.append((_hash(name.encode()), np.frombuffer(text, dtype=np.uint8)))
            size += len(text)
    # ordered by hash, topics and sources are mixed throughout
    documents.sort(key=lambda document: document[0])
    train, val = [], []
    for key, text in documents:
        (train if key % HELD_OUT else val).extend([np.array([256], dtype="<u2"), text])
    if size < PYTHON_LEAST or not val:
        raise DataError(f"embedded corpus: only {size:,} bytes, as this Python comes without its sources and "
                        f"documentation; fetch FineWeb: {FETCH}")
    label = Path("embedded corpus")
    train, val = (Stream([(label, np.concatenate(parts))], "bytes") for parts in (train, val))
    return Corpus(f"python-{sys.version.split()[0]}", "bytes", train, val)


# -----------------------------------------------------------------------------
# fetching FineWeb

FINEWEB_URL = "https://huggingface.co/datasets/kjj0/fineweb10B-gpt2/resolve/main"
FINEWEB_SHARDS = 103                # of 100M training tokens each
SHARD_LIMIT = 2 << 30               # bytes; a header that announces more is not believed
STALL_SECONDS = 30                  # without a byte
RETRIES = 4                         # in a row without progress
BACKOFF_SECONDS = 1                 # before the first retry, then doubled each time
NETWORK_FAULTS = (urllib.error.URLError, http.client.HTTPException, ssl.SSLError, TimeoutError,
                  ConnectionError)


def fetch_fineweb(out: Path, shards: int, base_url: str) -> None:
    """ Fetch the held-out shard and the first training shards, except those that are here and whole. """
    if not 1 <= shards <= FINEWEB_SHARDS:
        raise DataError(f"--shards={shards}: FineWeb-10B has 1 to {FINEWEB_SHARDS}")
    if not _is_web(base_url):
        raise DataError(f"--url={base_url}: not an http or https address, which is ASCII without blanks; "
                        f"leave it out for {FINEWEB_URL}")
    _make_folder(out)
    if (encoding_name := _read_meta(out)) != "gpt2":
        raise DataError(f"{out}: made for {encoding_name} ids, and FineWeb's are gpt2; give another --out")
    for name in ["fineweb_val_000000.bin"] + [f"fineweb_train_{i + 1:06d}.bin" for i in range(shards)]:
        path = out / name
        try:
            open_shard(path)
            print(f"{path}: already here")
        except DataError as e:
            if path.exists():
                print(f"{str(e).partition(';')[0]}; fetching it again")
            _download(f"{base_url.rstrip('/')}/{name}", path)
            print(f"{path}: fetched")
    print(_open_folder(out).describe())


def _is_web(url: str) -> bool:
    """ Whether urllib can make an http or https request of it. """
    try:
        parts = urllib.parse.urlsplit(url)
        host, _ = (parts.hostname or "").encode("idna"), parts.port
    except ValueError:      # a [ without its ], a port that is no number, a host like "." or "a..b"
        return False
    return bool(host and parts.scheme in ("http", "https") and re.fullmatch("[!-~]+", url))


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        file = next(path for path in (out, *out.parents) if os.path.lexists(path))
        raise DataError(f"{file}: a file is in the way of the folder {out}; give another --out") from None


def _download(url: str, path: Path) -> None:
    """ Fetch one shard by way of a .part file, which outlives a broken connection and a stopped program. """
    part = path.with_name(path.name + ".part")
    failures, most = 0, 0
    while True:
        try:
            _transfer(url, part)
            break
        except NETWORK_FAULTS as e:
            size = part.stat().st_size if part.exists() else 0
            failures, most = (1, size) if size > most else (failures + 1, most)
            if failures > RETRIES:
                raise DataError(f"{url}: {str(e) or type(e).__name__}; run the same command again to go on "
                                f"after the {size:,} bytes already here") from None
            time.sleep(BACKOFF_SECONDS * 2 ** (failures - 1))
    with open(part, "rb+") as f:
        os.fsync(f.fileno())
    os.replace(part, path)
    _progress("")


def _transfer(url: str, part: Path) -> None:
    """
    One request, which adds to part what it lacks. Returns once part is as long as its own header says.

    errors  one of NETWORK_FAULTS where another request may help, DataError where none will. What cannot be
            the beginning of the shard is deleted
    """
    try:
        with open(part, "rb") as f:
            _, wanted = parse_header(f.read(HEADER_BYTES))
            have = os.fstat(f.fileno()).st_size
    except (FileNotFoundError, DataError):
        have, wanted = 0, None
    if have == wanted:              # stopped between the last byte and the renaming
        return
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=STALL_SECONDS)
    except urllib.error.HTTPError as e:
        e.close()
        answer = f"the server says {e.code} {http.client.responses.get(e.code, '')}"
        if e.code == 416:           # the server's file ends before ours does, so ours began as another file
            part.unlink(missing_ok=True)
        elif e.code not in (408, 429) and e.code < 500:
            raise DataError(f"{url}: {answer}; check --shards and --url") from None
        raise ConnectionError(answer) from None
    except ValueError as e:         # of a redirect, as our own address has been looked at
        raise DataError(f"{url}: leads to what is no address ({e}); give another --url") from None
    with response:
        if urllib.parse.urlsplit(response.url).scheme not in ("https", urllib.parse.urlsplit(url).scheme):
            raise DataError(f"{url}: leads to {response.url}, which is less safe; give another --url")
        # a server is free to ignore Range and send everything from the start
        resumed = have and response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        try:
            with open(part, "ab" if resumed else "wb") as f:
                _receive(response, f, *((have, wanted) if resumed else (0, None)))
        except DataError as e:
            part.unlink()
            # the fault may lie in what we had: only a fresh beginning speaks against the server
            raise (ConnectionError(e) if resumed else DataError(f"{url}: {e}; give another --url")) from None


def _receive(response: http.client.HTTPResponse, f, have: int, wanted: int | None) -> None:
    """
    Copy the response to the end of f, which has `have` bytes of a shard of `wanted`.

    What the server announces has to agree with the shard's header, and nothing beyond that is read.
    """
    total = None if response.length is None else have + response.length
    if not have:
        header = response.read(HEADER_BYTES)
        if len(header) < HEADER_BYTES:
            raise ConnectionError("the connection broke off inside the header")
        _, wanted = parse_header(header)
        have = f.write(header)
    if wanted > SHARD_LIMIT or total not in (None, wanted):
        raise DataError(f"the server announces {total} bytes, the shard's header {wanted}")
    while have < wanted:
        # read1 hands over what is there, so a stall loses nothing of what came before it
        chunk = response.read1(min(1 << 20, wanted - have))
        if not chunk:
            raise ConnectionError(f"the connection broke off after {have:,} of {wanted:,} bytes")
        have += f.write(chunk)
        _progress(f"{Path(f.name).stem}: {have / 1e6:.0f} of {wanted / 1e6:.0f} MB")
    if have > wanted or response.read(1):
        raise DataError(f"the server goes on after the {wanted:,} bytes of the shard's header")


def _progress(text: str) -> None:
    """ A line that rewrites itself, on a terminal only; "" clears it. """
    if sys.stderr.isatty():
        print(f"\r{text}\033[K", end="", file=sys.stderr, flush=True)


# -----------------------------------------------------------------------------
# tokenizing text

PIECE_BYTES = 1 << 20       # text is tokenized in pieces of about this size


def tokenize(files: list[Path], out: Path, encoding_name: str, val: float, shard_tokens: int,
             overwrite: bool = False) -> None:
    """
    Tokenize files into a folder of shards. Each line of a .jsonl file is a document; any other file is one.

    Memory is bounded by a piece of text (or a .jsonl line) and by a shard, however long the files are. The
    disk holds the ids twice for a while: nothing gets its final name before all is written.

    in      val     fraction to hold out
    errors  DataError for a fault in the files or in the folder
    """
    for path in files:
        if not path.is_file():
            raise DataError(f"{path}: no such file; name the text and .jsonl files to tokenize")
    if not (0 < val <= 0.5 and 1 <= shard_tokens < 1 << 31):        # the header's count is an int32
        raise DataError(f"--val={val} --shard_tokens={shard_tokens}: give 0 < val <= 0.5, "
                        "1 <= shard_tokens < 2^31")
    shards, meta = _shard_files(out), out / "meta.json"
    old = shards["val"] + shards["train"]
    for path in [*old, meta]:
        if path.is_dir():
            raise DataError(f"{path}: a folder is in the way of a file; move it, or give another --out")
    if old and not overwrite:
        raise DataError(f"{out}: holds {len(old)} shards already; give another --out, or --overwrite")
    encoding = load_encoding(encoding_name)
    dtype = np.dtype("<u2" if encoding.n_vocab <= 1 << 16 else "<u4")

    _make_folder(out)
    with tempfile.TemporaryDirectory(dir=out, prefix="making-") as made:
        made = Path(made)
        _write_ids(files, encoding, dtype, val, made)
        for first, split in enumerate(("val", "train")):        # numbered from 0 and from 1, as FineWeb's are
            n_tokens = (made / split).stat().st_size // dtype.itemsize
            for number, start in enumerate(range(0, n_tokens, shard_tokens), first):
                count = min(shard_tokens, n_tokens - start)
                ids = np.fromfile(made / split, dtype, count, offset=start * dtype.itemsize)
                write_shard(made / f"text_{split}_{number:06d}.bin", ids)
        (made / "meta.json").write_text(json.dumps({"encoding": encoding_name}) + "\n", encoding="utf-8")
        _exchange(old + [meta] * os.path.lexists(meta), sorted(made.glob("*.*")), out)
    _progress("")
    print(_open_folder(out).describe())


def _exchange(old: list[Path], new: list[Path], out: Path) -> None:
    """
    Move the new files into out in place of the old ones. If that fails, out is as it was.

    old is in the order val, train, meta, and new in the reverse one. Killed outright, this leaves a folder
    without held-out shards, which open_corpus refuses, and the old files in a folder replaced-* in it.
    """
    aside = Path(tempfile.mkdtemp(dir=out, prefix="replaced-"))
    moves = [(path, aside / path.name) for path in old] + [(path, out / path.name) for path in new]
    try:
        for source, target in moves:
            os.replace(source, target)
    except BaseException:
        for source, target in reversed(moves):
            if not os.path.lexists(source):
                os.replace(target, source)
        aside.rmdir()
        raise
    shutil.rmtree(aside)


def _write_ids(files: list[Path], encoding, dtype: np.dtype, val: float, folder: Path) -> None:
    """
    Write the ids of the training documents to folder/train, of those held out to folder/val, without headers.

    The hash of a document's text (of its first piece) decides, so that copies of a document stay together.
    The first document always trains. If none was held out, the end of the training ids is: of one long text,
    its tail.
    """
    n_documents = 0
    with open(folder / "train", "wb+") as train_file, open(folder / "val", "wb") as val_file:
        for path in files:
            for pieces in _documents(path):
                f = None
                for text in pieces:
                    ids = encoding.encode_ordinary(text)        # what looks like a special token stays text
                    if f is None:
                        held_out = n_documents and _hash(text.encode(errors="replace")) < val * 2**64
                        f = val_file if held_out else train_file
                        n_documents += 1
                        ids.insert(0, encoding.eot_token)
                    f.write(np.array(ids, dtype=dtype).tobytes())
                    _progress(f"{path.name}: {n_documents:,} documents so far")
        n_train = train_file.tell() // dtype.itemsize
        if not n_train:
            raise DataError(f"{files[0]}: no text, in {len(files)} files altogether; name one that has some")
        if not val_file.tell():
            tail = min(max(1, round(val * n_train)), n_train - 1)
            end = train_file.seek((n_train - tail) * dtype.itemsize)
            shutil.copyfileobj(train_file, val_file)
            train_file.truncate(end)


def _documents(path: Path):
    """ The documents of a file, each an iterable of its pieces: strings, none of them empty. """
    if path.suffix != ".jsonl":
        # a piece goes on to the end of its line, unless that line is itself beyond measure
        yield (text for _, text in _decoded(path, lambda f: f.read(PIECE_BYTES) + f.readline(PIECE_BYTES)))
        return
    for number, line in _decoded(path, lambda f: f.readline()):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise DataError(f"{path}:{number}: not JSON; correct that line or remove it") from None
        text = record.get("text") if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise DataError(f'{path}:{number}: no "text" string; write each line like {{"text": "..."}}')
        yield [text] if text else []


def _decoded(path: Path, read):
    """ (line number, text) of each block that read(f) takes from the file, be it in mid-character. """
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    number = 1
    with open(path, "rb") as f:
        while True:
            block = read(f)
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as e:
                number += e.object[:e.start].count(b"\n")
                # what Windows calls Unicode begins with one of these marks
                like = "UTF-16" if e.object[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "LATIN1"
                raise DataError(f"{path}:{number}: not UTF-8; convert it: iconv -f {like} -t UTF-8") from None
            if text:
                yield number, text
            if not block:
                return
            number += block.count(b"\n")


# -----------------------------------------------------------------------------
# command line

class Parser(argparse.ArgumentParser):
    """ An ArgumentParser whose complaint is one line, as every other is here. """

    def error(self, message: str):
        _complain(f"{message}; see {self.prog} --help")
        self.exit(2)


def _complain(text: str) -> None:
    """ One line, whatever a server or an argument put into it. """
    print("error:", "".join(filter(str.isprintable, text)), file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    """ Returns the exit code: 0, 2 for a fault that the last line explains, 130 if stopped by Ctrl-C. """
    # allow_abbrev=False: a mistyped --shard is an error, not --shards
    parser = Parser(description="Fetch or make token shards.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    fetch = commands.add_parser("fineweb10B", allow_abbrev=False, help="fetch shards of FineWeb-10B")
    fetch.add_argument("--shards", type=int, required=True, help="training shards, 100M tokens each")
    fetch.add_argument("--out", default="data/fineweb10B", help="folder (data/fineweb10B)")
    fetch.add_argument("--url", default=FINEWEB_URL, help="a mirror's folder")
    text = commands.add_parser("text", allow_abbrev=False, help="tokenize text and .jsonl files")
    text.add_argument("files", type=Path, nargs="+", help='plain text, or .jsonl with lines {"text": "..."}')
    text.add_argument("--out", required=True, help="folder, such as data/mine")
    text.add_argument("--encoding", default="gpt2", choices=VOCAB_SIZE,
                      help="vocabulary (gpt2, which has to be fetched once; bytes needs no network)")
    text.add_argument("--val", type=float, default=0.01, help="fraction to hold out (0.01)")
    text.add_argument("--shard_tokens", type=int, default=100_000_000, help="tokens in a file (100,000,000)")
    text.add_argument("--overwrite", action="store_true", help="replace the shards in the folder")
    args = parser.parse_args(argv)
    try:
        if not args.out:            # the current folder, to Path
            raise DataError("--out= is empty; name a folder, e.g. --out=data/mine, or --out=. for this one")
        out = _expand(args.out)
        if args.command == "text":
            tokenize(args.files, out, args.encoding, args.val, args.shard_tokens, args.overwrite)
        else:
            fetch_fineweb(out, args.shards, args.url)
        return 0
    except (DataError, OSError) as e:
        _progress("")
        # a full disk names no file
        _complain(str(e) if isinstance(e, DataError) else
                  f"{e.filename or out}: {e.strerror or e}; make room or way for it, or give another --out")
        return 2
    except KeyboardInterrupt:
        print("\nstopped; run the same command again, and a download goes on where it was", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
