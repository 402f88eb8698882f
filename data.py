"""
Token data: shards on disk, the endless stream of sequences that a run reads from them, and the commands that
make them.

    python data.py fineweb10B --shards=1                    fetch 100M tokens of FineWeb
    python data.py text a.txt b.jsonl --out=data/mine       tokenize your own text
    python train.py --data=data/mine                        train on it; without --data a run reads the text
                                                            of this Python installation: nothing to download

A shard is a file with a header and token ids behind it. It is memory-mapped: a run holds only what it reads.

    | 256 x int32: magic, version, count, 0 ... | count ids ...                        all little-endian

      magic 20240520, version 1: uint16 ids, as the published shards of FineWeb have them
      magic 20240801, version 7: uint32 ids, llm.c's format for more than 65536 ids, so that none ever wraps

A folder of shards holds NAME_train_NUMBER.bin, NAME_val_NUMBER.bin (val is held out) and, unless its ids are
GPT-2's, a meta.json, as {"encoding": "bytes"}. The id of end-of-text opens each document.

A batch is a function of (seed, number of its first sequence) and of nothing else: there is no loader state
to save, and one GPU or eight read the same global batch.

What a file says of itself, its header, length, name and encoding, is checked when it is opened; the ids, of
which there may be billions, when they are read. Left out on purpose: a prefetching thread (a batch is a few
hundred small copies), attention masks between documents, mixtures of corpora, training a tokenizer.
"""
import argparse
import gzip
import hashlib
import json
import os
import re
import shutil
import sys
import sysconfig
import zlib
from bisect import bisect_right
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path

from config import in_full      # before PyTorch, see there

import numpy as np
import torch
from torch import Tensor

MAKE = "python data.py --help tells how to get shards"     # how messages end


class DataError(ValueError):
    """ A fault that the user can mend. Its text is one line: what is wrong, where, and what to do. """


# -----------------------------------------------------------------------------
# streams: shards laid end to end and cut into sequences


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

    def sequences(self, first: int, count: int, seq_len: int, seed: int, shuffle: int) -> Tensor:
        """
        Sequences number first .. first + count - 1 of the endless stream.

        in      first    counts over all steps, micro-steps and ranks
                shuffle  windows in a shuffle block. Order is shuffled within each block, anew in each epoch;
                         0 keeps the order of the stream
        out     (count, seq_len + 1) int64; inputs are [:, :-1], targets [:, 1:]
        errors  DataError if the stream is shorter than one sequence, or an id is not in the vocabulary
        """
        n_windows = self.windows(seq_len)
        out = np.empty((count, seq_len + 1), dtype=np.int64)
        for row in range(count):
            epoch, window = divmod(first + row, n_windows)
            if shuffle:
                block, place = divmod(window, shuffle)
                begin = block * shuffle
                size = min(shuffle, n_windows - begin)          # the last block may be short
                window = begin + int(permutation(seed, epoch, block, size)[place])
            self.read(window * seq_len, out[row])
        return torch.from_numpy(out)

    def windows(self, seq_len: int) -> int:
        """ Windows in an epoch. DataError if the stream is shorter than one sequence. """
        if self.n_tokens < seq_len + 1:
            raise DataError(f"{self.paths[0]}: {self.n_tokens:,} tokens in all, and a sequence has "
                            f"{seq_len + 1:,}; type a smaller --seq_len, or get more: data.py has --val")
        return -(-self.n_tokens // seq_len)

    def whole_windows(self, seq_len: int) -> int:
        """ Windows in an epoch that do not wrap round: a validation loss over them counts no token twice. """
        self.windows(seq_len)
        return (self.n_tokens - 1) // seq_len

    @lru_cache(maxsize=1)       # asked for twice: before an old run is touched, and for the log
    def unigram_entropy(self, limit: int = 10_000_000) -> float:
        """
        Entropy of how often each of the first `limit` tokens occurs, in nats: the loss of a model that has
        learnt these frequencies and no more. Before training, it also finds an id beyond the vocabulary.
        """
        tokens = np.empty(min(limit, self.n_tokens), dtype=np.int64)
        self.read(0, tokens)
        counts = np.bincount(tokens)
        p = counts[counts > 0] / len(tokens)
        return float(-(p * np.log(p)).sum())

    def read(self, start: int, out: np.ndarray):
        """ Fill out, (n,) int64, with the tokens from position start on, wrapping round at the end. """
        shard = bisect_right(self.ends, start)
        at = start - self.ends[shard] + len(self.shards[shard])         # position within the shard
        filled = 0
        while filled < len(out):
            tokens = self.shards[shard][at : at + len(out) - filled]
            # past the embedding's last row, a GPU fails without a word about where the id came from
            if tokens.max() >= self.vocab_size:
                bad = int(np.argmax(tokens >= self.vocab_size))
                raise DataError(f"{self.paths[shard]}: id {tokens[bad]} at position {at + bad:,} is beyond "
                                f"the vocabulary of {self.vocab_size:,}; name its encoding in a meta.json")
            out[filled : filled + len(tokens)] = tokens
            filled += len(tokens)
            shard, at = (shard + 1) % len(self.shards), 0


@lru_cache(maxsize=4)       # a run goes from block to block, so it never comes back to more than a few
def permutation(seed: int, epoch: int, block: int, size: int) -> np.ndarray:
    """
    The order of one shuffle block. spawn_key keeps the numbers apart: with seed + epoch, seed 1 in epoch 2
    would repeat seed 2 in epoch 1; even in [seed, epoch, block], a seed beyond 2^32 spills into the epoch.
    """
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(epoch, block))).permutation(size)


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
    """ The corpus in a folder of shards, or with "" Python's own text. DataError if it cannot be used. """
    if not path:
        return open_python()
    folder = in_full(path)
    try:
        shards = {"train": [], "val": []}
        for file in sorted(folder.iterdir()):
            # others are passed by: ._NAME of macOS, copies called "NAME (1).bin" or "Copy of NAME.bin"
            if name := re.fullmatch(r"[^.\s]\S*_(train|val)_\d+\.bin", file.name):
                shards[name[1]].append((file, open_shard(file)))
        encoding_name = read_meta(folder)
    except OSError as error:
        raise DataError(f"{error.filename or folder}: {error.strerror}; {MAKE}") from None
    for split, found in shards.items():
        if not found:
            raise DataError(f"{folder}: no {split} shards, NAME_{split}_NUMBER.bin, no blank in it; {MAKE}")
    return Corpus(folder.name, encoding_name, *(Stream(found, encoding_name) for found in shards.values()))


# -----------------------------------------------------------------------------
# shards

HEADER_BYTES = 256 * 4
FORMATS = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}      # (magic, version): ids


def open_shard(path: Path) -> np.ndarray:
    """ The ids of a shard, (n,) uint16 or uint32, memory-mapped. DataError if it is none, empty, or cut. """
    if not path.is_file():      # to open a pipe would wait for ever; and a link to nowhere is a shard less
        raise DataError(f"{path}: no regular file, or a link to nowhere; {MAKE}")
    with open(path, "rb") as f:
        header, size = f.read(HEADER_BYTES), os.fstat(f.fileno()).st_size
    magic, version, count = np.frombuffer(header.ljust(12, b"\0"), dtype="<i4", count=3).tolist()
    if (magic, version) not in FORMATS:
        raise DataError(f"{path}: not a token shard (magic {magic}, version {version}); {MAKE}")
    dtype = FORMATS[magic, version]
    wanted = HEADER_BYTES + count * dtype.itemsize
    if count < 1 or size != wanted:
        raise DataError(f"{path}: {size:,} bytes, and its header, with {count:,} tokens, wants {wanted:,}; "
                        f"get it again: {MAKE}")
    return np.memmap(path, dtype=dtype, mode="r", offset=HEADER_BYTES)


def write_shard(path: Path, tokens: np.ndarray):
    """ Write tokens, (n,) uint16 or uint32, which picks the format, and wait until they are on the disk. """
    magic, version = {dtype: key for key, dtype in FORMATS.items()}[tokens.dtype]
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, len(tokens)
    with open(path, "wb") as f:
        f.write(header.tobytes())
        f.write(tokens.tobytes())
        f.flush()
        os.fsync(f.fileno())


def read_meta(folder: Path) -> str:
    """ The name of the encoding of a folder's shards: what meta.json says, gpt2 where there is none. """
    path = folder / "meta.json"
    if not os.path.lexists(path):
        return "gpt2"
    meta = read_json(path)
    if not isinstance(meta, dict) or meta.get("encoding") not in [*VOCAB_SIZE]:
        raise DataError(f'{path}: not like {{"encoding": "gpt2"}}, with one of {", ".join(VOCAB_SIZE)}')
    return meta["encoding"]


def read_json(path: Path):
    """ What a JSON file holds; None if it is none. A pipe, which would wait, is not opened. """
    try:
        return json.loads(path.read_bytes()) if path.is_file() else None
    except (ValueError, RecursionError):
        return None


# -----------------------------------------------------------------------------
# encodings

# ids in each vocabulary: all that training needs, for which tiktoken would ask the network
VOCAB_SIZE = {"bytes": 257, "gpt2": 50_257, "r50k_base": 50_257, "p50k_base": 50_281, "cl100k_base": 100_277,
              "o200k_base": 200_019}
EOT = "<|endoftext|>"


def load_encoding(name: str):
    """ The tiktoken.Encoding of that name. In "bytes", UTF-8's bytes are 0 .. 255, and 256 ends a text. """
    try:
        import tiktoken
    except ImportError:
        raise DataError("text needs the package tiktoken: type pip install tiktoken") from None
    if name == "bytes":
        # with no merges a piece falls apart into its bytes, so the pattern only bounds how long a piece gets
        return tiktoken.Encoding("bytes", pat_str=r"(?s:.{1,256})", special_tokens={EOT: 256},
                                 mergeable_ranks={bytes([i]): i for i in range(256)})
    try:
        return tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:      # OSError: all of the network's; ValueError: a wrong hash
        raise DataError(f"cannot load the {name} vocabulary ({type(error).__name__}); without a network, set "
                        "TIKTOKEN_CACHE_DIR to a folder with its files, or use --encoding=bytes") from None


# -----------------------------------------------------------------------------
# the default data: the text of the Python installation itself, which everybody who runs this file has

PYTHON_BYTES = 6_000_000        # at most, so that it opens in a fraction of a second
PYTHON_LEAST = 200_000          # with less there is nothing to learn
HELD_OUT = 20                   # one document in so many
SKIPPED = {"test", "tests", "idle_test", "idlelib", "lib2to3",      # fixtures and deliberately odd code
           "encodings", "pydoc_data",                               # tables, and the topics, taken separately
           "site-packages", "dist-packages"}                        # not Python's own


def open_python() -> Corpus:
    """ Topics, then sources up to the cap, as bytes. They change with Python's version: the name has it. """
    documents, size = [], 0
    for name, text in python_topics() + python_sources():
        if size + len(text) <= PYTHON_BYTES:
            documents.append((stable_hash(name.encode()), np.frombuffer(text, dtype=np.uint8)))
            size += len(text)
    # ordered by hash, topics and sources are mixed throughout
    documents.sort(key=lambda document: document[0])
    train, val = [], []
    for key, text in documents:
        (train if key % HELD_OUT else val).extend([np.array([256], dtype="<u2"), text])
    if size < PYTHON_LEAST or not val:
        raise DataError("this Python lacks the sources and documentation that are the default data; type "
                        f"--data=DIR of a folder with shards; {MAKE}")
    train, val = (Stream([(Path("Python's own text"), np.concatenate(parts))], "bytes")
                  for parts in (train, val))
    return Corpus(f"python-{sys.version.split()[0]}", "bytes", train, val)


def python_topics() -> list[tuple[str, bytes]]:
    """
    The language reference in pydoc's form, (name, text) of each topic. Many are sections of longer ones, and
    held-out text must not stand in the training text: so the longest go first, and one that was by over a
    fifth seen before is left out.
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


def python_sources() -> list[tuple[str, bytes]]:
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


def stable_hash(data: bytes) -> int:
    """ 64 bits, the same in every process and on every machine, as Python's own hash() is not. """
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


# -----------------------------------------------------------------------------
# python data.py fineweb10B

FINEWEB = "kjj0/fineweb10B-gpt2"    # a dataset on Hugging Face: FineWeb's 10B sample in GPT-2's ids
FINEWEB_SHARDS = 103                # of 100M training tokens each


def fetch_fineweb(out: Path, shards: int):
    """
    Fetch the held-out shard and the first training shards, except those that are here and whole. A file has
    its name once it is whole. HF_ENDPOINT in the environment names a mirror.
    """
    if not 1 <= shards <= FINEWEB_SHARDS:
        raise DataError(f"--shards={shards}: FineWeb-10B has 1 to {FINEWEB_SHARDS}")
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise DataError("FineWeb needs a package more: type pip install huggingface_hub") from None
    if os.path.lexists(out / "meta.json"):
        raise DataError(f"{out}: holds a meta.json, so other shards than FineWeb's; give another --out")
    for name in ["fineweb_val_000000.bin"] + [f"fineweb_train_{i + 1:06d}.bin" for i in range(shards)]:
        damaged = (out / name).exists()
        with suppress(OSError, DataError):
            open_shard(out / name)
            continue
        try:
            hf_hub_download(FINEWEB, name, repo_type="dataset", local_dir=out, force_download=damaged)
        except Exception as error:      # the library's own, its HTTP client's, the disk's
            while error.__cause__:      # the library says "check your connection" of a 503 too
                error = error.__cause__
            reason, *_ = [*str(error).splitlines(), ""]
            raise DataError(f"cannot fetch {name}: {reason} ({type(error).__name__}); once that is mended, "
                            "the same command goes on where it was") from None
    print(open_corpus(str(out)).describe())


# -----------------------------------------------------------------------------
# python data.py text

PIECE = 1 << 20                                 # text is tokenized in pieces of about so many characters
RECORDS = (".jsonl", ".ndjson", ".json")        # files whose lines are records: {"text": "..."}
LEAST = 256                                     # with fewer tokens there is nothing to train on
# what is given in place of text, by its first bytes, and how to make text of it
OTHERS = {b"PAR1": "Parquet: write its texts as lines of JSON", b"PK\3\4": "zip: type unzip",
          b"BZh": "bzip2: type bunzip2", b"\xfd7zX": "xz: type unxz", b"\x28\xb5\x2f\xfd": "zstd: type "
          "unzstd", b"%PDF": "PDF: type pdftotext", b"\0\5\x16\7": "macOS's notes: leave it out"}


def tokenize(files: list[Path], out: Path, encoding_name: str, val: float, shard_tokens: int):
    """
    Tokenize files into a new folder of shards, of which a share `val` is held out. Memory is bounded by a
    piece of text (or a record) and by a shard; the disk holds the ids twice for a while.
    """
    for path in files:
        if not path.is_file():
            raise DataError(f"{path}: no regular file; name the text and .jsonl files to tokenize")
        next(pieces(path), None)    # another format is told now, not after hours
    if not (0 < val <= 0.5 and 1 <= shard_tokens < 1 << 31):        # the header's count is an int32
        raise DataError(f"--val={val} --shard_tokens={shard_tokens}: give 0 < val <= 0.5, "
                        "1 <= shard_tokens < 2^31")
    encoding = load_encoding(encoding_name)
    dtype = np.dtype("<u2" if encoding.n_vocab <= 1 << 16 else "<u4")
    with new_folder(out) as making:
        documents = write_ids(files, encoding, dtype, val, making)
        for first, split in enumerate(("val", "train")):        # numbered from 0 and from 1, as FineWeb's are
            ids = making / split
            total = ids.stat().st_size // dtype.itemsize
            for number, start in enumerate(range(0, total, shard_tokens), first):
                count = min(shard_tokens, total - start)
                write_shard(making / f"text_{split}_{number:06d}.bin",
                            np.fromfile(ids, dtype, count, offset=start * dtype.itemsize))
            ids.unlink()
        (making / "meta.json").write_text(json.dumps({"encoding": encoding_name}) + "\n", encoding="utf-8")
    print(f"{documents:,} documents in {open_corpus(str(out)).describe()}")


@contextmanager
def new_folder(out: Path):
    """ A folder to fill, which takes the name `out` once all is in it. One command at a time fills it. """
    out = Path(os.path.realpath(out))       # of a link, where it leads
    if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
        raise DataError(f"{out}: there already, and no empty folder; name another one")
    making = out.with_name(f"{out.name}.making")
    try:
        making.mkdir(parents=True)
    except FileExistsError:
        raise DataError(f"{making}: another command fills it now, or was killed and left it; wait, or remove "
                        "it, or name another folder") from None
    try:
        if out.is_dir():
            out.rmdir()     # it is empty, or this fails: of a mount point now, not when all is done
        yield making
        making.rename(out)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def write_ids(files: list[Path], encoding, dtype: np.dtype, val: float, folder: Path) -> int:
    """
    Write the ids of documents to folder/train, or held out to folder/val, without headers -> their number.

    The hash of a document's text (of its first piece) decides, so that copies of a document stay together.
    The first document always trains. If none was held out, the end of the training ids is: of one long text,
    its tail.
    """
    documents, file = 0, None
    with open(folder / "train", "wb+") as train_file, open(folder / "val", "wb") as val_file:
        for path in files:
            for opens, text in pieces(path):
                ids = encoding.encode_ordinary(text)            # what looks like a special token stays text
                if opens:
                    held_out = documents and stable_hash(text.encode(errors="replace")) < val * 2**64
                    file, documents = val_file if held_out else train_file, documents + 1
                    ids.insert(0, encoding.eot_token)
                file.write(np.array(ids, dtype=dtype).tobytes())
            print(f"{path}: {documents:,} documents so far")
        total = (train_file.tell() + val_file.tell()) // dtype.itemsize
        if total < LEAST:
            raise DataError(f"{files[0]}: {total} tokens altogether are too few to train on; name more text")
        if not val_file.tell():
            tail = min(max(1, round(val * total)), total - 1)
            end = train_file.seek((total - tail) * dtype.itemsize)
            shutil.copyfileobj(train_file, val_file)
            train_file.truncate(end)
    return documents


def pieces(path: Path):
    """
    The text of a file in pieces, none of them empty, each with whether it opens a document. A record does;
    other files are cut at each <|endoftext|>, as TinyStories has between its tales, and at ends of lines.
    """
    try:
        with open_text(path) as file:
            if path.name.lower().removesuffix(".gz").endswith(RECORDS):
                for number, line in enumerate(file, 1):
                    if text := record(path, number, line):
                        yield True, text
                return
            opens = True
            cut = tuple(EOT[:n] for n in range(1, len(EOT)))
            while block := file.read(PIECE) + file.readline(PIECE):
                while block.endswith(cut) and (more := file.read(1)):
                    block += more       # a mark in a line without end is not cut in two
                if "\0" in block:
                    raise DataError(f"{path}: holds NUL characters, so it is no text, or not in UTF-8")
                for i, text in enumerate(block.split(EOT)):
                    opens = opens or i > 0
                    if text:
                        yield opens, text
                        opens = False
    except UnicodeDecodeError:
        with open_text(path) as file:
            bad = next(number for number, line in enumerate(file.buffer, 1)
                       if line.decode(errors="ignore").encode() != line)
        raise DataError(f"{path}:{bad}: not UTF-8; if it is text, convert it, by iconv -f ENCODING -t "
                        "UTF-8") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: damaged or incomplete ({error}); get it again") from None


def open_text(path: Path):
    """ The file, unpacked if it is gzip's, to be read as text. DataError if its first bytes are others'. """
    with open(path, "rb") as file:
        opener = gzip.open if file.read(2) == b"\x1f\x8b" else open
    # newline="\n" leaves every line end as it is
    file = opener(path, "rt", encoding="utf-8-sig", newline="\n")
    head = file.buffer.peek(4)[:4]
    for start in filter(head.startswith, OTHERS):
        raise DataError(f"{path}: not text but {OTHERS[start]}")
    found = re.sub("-([lb]e)", r"\1", json.detect_encoding(head))       # by a mark, or by NULs
    if found not in ("utf-8", "utf-8-sig"):
        raise DataError(f"{path}: not UTF-8; if it is text, convert it, by iconv -f {found} -t utf-8")
    return file


def record(path: Path, number: int, line: str) -> str:
    """ The text of one record; "" for an empty line. """
    try:
        return json.loads(line)["text"] + "" if line.strip() else ""        # only a str adds to ""
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DataError(f'{path}:{number}: no record with a "text"; write each line like {{"text": "..."}}'
                        ) from None


# -----------------------------------------------------------------------------
# the command line


def main(argv: list[str]) -> int:
    """ The program's exit code: 2 for a mistake that the last line explains, 130 after Ctrl-C. """
    # allow_abbrev=False: a mistyped --shard is an error, not --shards
    parser = argparse.ArgumentParser(description="Fetch or make token shards.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    fetch = commands.add_parser("fineweb10B", allow_abbrev=False, help="fetch shards of FineWeb-10B")
    fetch.add_argument("--shards", type=int, required=True, help="training shards, 100M tokens each")
    fetch.add_argument("--out", type=in_full, default="data/fineweb10B", help="folder (data/fineweb10B)")
    text = commands.add_parser("text", allow_abbrev=False, help="tokenize text and .jsonl files")
    text.add_argument("files", type=Path, nargs="+",
                      help='text, or .jsonl with lines {"text": "..."}, or .gz')
    text.add_argument("--out", type=in_full, required=True, help="a new folder, such as data/mine")
    text.add_argument("--encoding", default="gpt2", choices=VOCAB_SIZE,
                      help="vocabulary (gpt2, which has to be fetched once; bytes needs no network)")
    text.add_argument("--val", type=float, default=0.01, help="share to hold out (0.01)")
    text.add_argument("--shard_tokens", type=int, default=100_000_000, help="tokens in a file (100,000,000)")
    args, status = parser.parse_args(argv), 2
    try:
        if args.command == "text":
            tokenize(args.files, args.out, args.encoding, args.val, args.shard_tokens)
        else:
            fetch_fineweb(args.out, args.shards)
        return 0
    except DataError as error:
        line = str(error)
    except OSError as error:        # a full disk names no file
        line = f"{error.filename or args.out}: {error.strerror or error}; mend that, or name another --out"
    except KeyboardInterrupt:
        line, status = "stopped; the same command starts again, and a download goes on where it was", 130
    print(f"error: {line}", file=sys.stderr)
    return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
