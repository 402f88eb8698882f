""" --wandb: the numbers of metrics.csv, one id for one run, and no run that ends for wandb's sake. """
import os
import socket
import sys
import threading
import time
import types

import pytest

import tracker
import train
from config import Config, ConfigError, package
from test_train import rows, shards, go  # noqa: F401 (fixtures)


class Fake(types.ModuleType):
    """ As much of wandb as is called: `calls` has what it is told; names and modes in `broken` raise. """

    def __init__(self):
        super().__init__("wandb")
        self.__file__, self.calls, self.broken, self.url = "fake", [], set(), "https://there/run"

    def __getattr__(self, name):
        def call(*args, **kwargs):
            self.calls.append((name, *args, kwargs))
            if name in self.broken or kwargs.get("mode") in self.broken:
                raise RuntimeError(f"{name}:\nno")
            return self
        return call

    def told(self, name: str) -> list:
        """ What came with each call of this name: the first argument, or the keywords. """
        return [call[1] if len(call) > 2 else call[-1] for call in self.calls if call[0] == name]


@pytest.fixture
def wandb(monkeypatch) -> Fake:
    """ wandb installed, on a machine without a network. """
    fake = Fake()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(tracker, "reachable", lambda url: False)
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    return fake


RUN = ["--recipe=bf16", "--eval_every=6"]


def test_wandb_gets_the_numbers_of_metrics_csv(go, wandb):    # noqa: F811
    """ Catches: a column that is left out, digits that differ from the file, a run that never ends. """
    folder, printed = go("r", *RUN, "--wandb")
    in_file = [{name: float(text) for name, text in row.items() if text} for row in rows(folder)]
    assert len(in_file) == 21 and wandb.told("log") == in_file
    begun, = wandb.told("init")
    assert begun["config"] == Config.from_dict(begun["config"]).to_dict() and begun["config"]["steps"] == 20
    assert (begun["mode"], begun["name"], begun["dir"]) == ("offline", "r", str(folder))
    assert wandb.told("finish") == [0]
    said, = [line for line in printed.splitlines() if line.startswith("wandb ")]
    assert said.startswith("wandb runs offline, without a network; to upload it: wandb sync ")


def test_a_run_keeps_its_id(go, wandb):    # noqa: F811
    """ Catches: a run in two halves there, and a new run that goes on under the id of a deleted one. """
    for flags in (["--stop_at=4"], ["--stop_at=8", "--wandb"], ["--stop_at=12", "--wandb"], ["--wandb"],
                  ["--wandb", "--overwrite"]):
        go("r", *RUN, *flags)
    ids = [call["id"] for call in wandb.told("init")]
    assert len(ids) == 4 and len(set(ids[:3])) == 1 and ids[3] != ids[0]
    steps = [row["step"] for row in wandb.told("log")]
    assert steps == [*range(4, 21), *range(21)]


@pytest.mark.parametrize("content", ["", "0123456789abcde", "../../etc/passwd", "x" * 10_000])
def test_an_id_that_is_none_is_replaced(tmp_path, content):
    """ Catches: a file that was torn, or edited, and goes into an address as it is. """
    (tmp_path / tracker.ID).write_text(content)
    made = tracker.run_id(tmp_path)
    assert len(made) == 16 and tracker.run_id(tmp_path) == made != content


def test_an_id_that_cannot_be_kept_is_one_line(go, wandb, tmp_path, capsys):    # noqa: F811
    (tmp_path / "r" / tracker.ID).mkdir(parents=True)
    with pytest.raises(SystemExit) as end:
        go("r", *RUN, "--wandb")
    err = capsys.readouterr().err
    assert end.value.code == 2 and tracker.ID in err and err.count("\n") == 1


@pytest.mark.parametrize("method", ["log", "finish"])
def test_a_failure_on_the_way_costs_one_line(go, wandb, monkeypatch, method):    # noqa: F811
    """ Catches: hours of training lost to a tracker, and a warning at each of a million rows. """
    wandb.broken = {method}
    errors = []
    monkeypatch.setattr(sys, "stderr", types.SimpleNamespace(write=errors.append, flush=lambda: None))
    folder, _ = go("r", *RUN, "--wandb")
    said = "".join(errors)
    assert said == f"warning: wandb gets no more rows: {method}: no; the run goes on\n"
    assert len(rows(folder)) == 21 and len(wandb.told("log")) == (1 if method == "log" else 21)


def test_a_run_that_fails_is_told(go, wandb, monkeypatch):    # noqa: F811
    """ Catches: a run that stands among the good ones there. """
    def fail(*_):
        raise train.TrainingError("no")
    monkeypatch.setattr(train, "train", fail)
    with pytest.raises(SystemExit):
        go("r", *RUN, "--wandb")
    assert wandb.told("finish") == [1]


@pytest.mark.parametrize("asked, network, broken, modes, says", [
    ("", True, [], ["online"], "wandb runs online, as there is a network; it is at https://there/run"),
    ("", True, ["online"], ["online", "offline"], "wandb runs offline, as online it cannot"),
    ("", True, ["online", "offline"], ["online", "offline"], None),
    ("", False, ["offline"], ["offline"], None),
    ("online", None, ["online"], ["online"], None),
    ("offline", None, [], ["offline"], "wandb runs offline, as WANDB_MODE says; to upload"),
    ("disabled", None, [], ["disabled"], "wandb runs disabled, as WANDB_MODE says"),
])
def test_modes(wandb, tmp_path, monkeypatch, asked, network, broken, modes, says):
    """
    Catches: WANDB_MODE overruled, a look at the network nobody asked for (network None), a training that
    cannot begin because a login has run out, an id that the failed attempt still holds.
    """
    def reachable(url):
        assert network is not None
        return network
    monkeypatch.setattr(tracker, "reachable", reachable)
    if asked:
        monkeypatch.setenv("WANDB_MODE", asked)
    wandb.broken, said = set(broken), []
    try:
        tracker.Tracker(Config(name="r"), tmp_path, said.append)
        assert says and said[-1].startswith(says)
    except ConfigError as error:
        assert not says and f"cannot start {modes[-1]}: init: no; mend that" in str(error)
    begun = wandb.told("init")
    assert [call["mode"] for call in begun] == modes
    assert [call["resume"] for call in begun] == ["allow" if mode == "online" else None for mode in modes]
    assert len(wandb.told("teardown")) == len(broken)


def test_without_wandb(go, monkeypatch, capsys):    # noqa: F811
    """
    Catches: an import for runs that did not ask, an old run deleted by a command that then fails, and a
    folder ./wandb that passes for the package.
    """
    monkeypatch.setitem(sys.modules, "wandb", None)
    folder, _ = go("r", *RUN)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert tracker.ID not in before
    for module in (None, types.ModuleType("wandb")):        # a folder's module has no file
        module and monkeypatch.setattr(module, "__file__", None, raising=False)
        monkeypatch.setitem(sys.modules, "wandb", module)
        with pytest.raises(SystemExit) as end:
            go("r", *RUN, "--overwrite", "--wandb")
        err = capsys.readouterr().err
        assert end.value.code == 2 and "type pip install wandb" in err and err.count("\n") == 1
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_broken_package_is_one_line(tmp_path, monkeypatch):
    """ Catches: the traceback of a package whose own packages are too new for it. """
    (tmp_path / "askew.py").write_text("raise TypeError('descriptors')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot be imported \(TypeError\): type pip install -U askew"):
        package("askew")


def test_reachable(monkeypatch):
    """ Catches: a start that hangs where names are not answered, and a proxy that is walked past. """
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert not tracker.reachable(url)
        server.listen()
        assert tracker.reachable(url)
        monkeypatch.setenv("https_proxy", url)
        assert tracker.reachable("https://nowhere.invalid")
    for url in ("", "nonsense", "http://[", "http://x:99999999"):
        assert not tracker.reachable(url)
    answered, began = threading.Event(), time.time()

    def ask(*_):
        answered.wait(3)
        raise OSError
    monkeypatch.setattr(socket, "create_connection", ask)
    assert not tracker.reachable("http://127.0.0.1", seconds=0.2)
    answered.set()
    assert time.time() - began < 2
