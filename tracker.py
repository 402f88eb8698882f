"""
The rows of metrics.csv to Weights & Biases too, for runs with --wandb.

    pip install wandb
    python train.py configs/tetrajet_full.py --wandb

metrics.csv stays the record. Where wandb's server cannot be reached, or nobody has logged in, wandb writes to
the run's folder, for `wandb sync` to upload later. WANDB_MODE=online, offline or disabled decides instead,
where it is set. A run that is continued keeps its id, which lies in its folder. Charts are drawn over the
column step: steps that a killed run has to compute again are there twice.

What this file leaves out: checkpoints, the console, any knob of wandb's that its own variables set, such as
WANDB_PROJECT and WANDB_ENTITY.
"""
import os
import re
import secrets
import shlex
import socket
import sys
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit
from urllib.request import getproxies

from config import Config, ConfigError, package

ID = "wandb_id.txt"


class Tracker:
    """ A run of wandb's, until something in it fails: from then on nothing is sent. """

    def __init__(self, cfg: Config, folder: Path, say):
        """ ConfigError if wandb is not installed, or cannot do what WANDB_MODE asks for. """
        self.run, name = None, run_id(folder)
        # at the end of a run it would wait for a lost network without limit
        os.environ.setdefault("WANDB_FINISH_TIMEOUT", "300")
        asked = os.environ.get("WANDB_MODE")
        modes = {asked: "as WANDB_MODE says"} if asked else {"offline": "without a network"}
        if not asked and reachable(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")):
            modes = {"online": "as there is a network", "offline": "as online it cannot"}
        for mode, why in modes.items():
            try:
                self.run = start(cfg, folder, name, mode)
            except Exception as error:      # wandb's own, and those of the packages that it uses
                problem = f"wandb cannot start {mode}: {one_line(error)}"
                if mode == [*modes][-1]:
                    raise ConfigError(f"{problem}; mend that, or leave out --wandb") from None
                say(problem)
                continue
            where = {"online": lambda: f"; it is at {self.run.url}", "offline": lambda:
                     f"; to upload it: wandb sync {shlex.quote(str(folder))}/wandb/*{name}"}
            say(f"wandb runs {mode}, {why}" + where.get(mode, str)())
            return

    def row(self, values: dict):
        """ What was measured at a step: column of metrics.csv -> number. """
        self._do(lambda: self.run.log(values))

    def close(self, code: int):
        self._do(lambda: self.run.finish(code))
        self.run = None

    def _do(self, call):
        try:
            if self.run:
                call()
        except Exception as error:
            self.run = None
            print(f"warning: wandb gets no more rows: {one_line(error)}; the run goes on", file=sys.stderr)


def start(cfg: Config, folder: Path, name: str, mode: str):
    """ A run of wandb's. """
    wandb = package("wandb")
    # silent: it neither asks for a login, in the middle of a night, nor writes between our lines
    settings = wandb.Settings(silent=True, console="off")
    try:
        run = wandb.init(project=os.environ.get("WANDB_PROJECT", "tetrajet"), name=cfg.name, id=name,
                         mode=mode, resume="allow" if mode == "online" else None, dir=str(folder),
                         config=cfg.to_dict(), settings=settings)
        run.define_metric("*", step_metric="step")
    except Exception:
        wandb.teardown()        # else the id counts as taken when the next mode is tried
        raise
    return run


def run_id(folder: Path) -> str:
    """ The id in the run's folder, or a new one that is written there. ConfigError if neither can be. """
    path = folder / ID
    try:
        with open(path, "a+b") as file:
            file.seek(0)
            known = file.read(100).decode(errors="replace")
            if not re.fullmatch("[0-9a-f]{16}", known):
                known = secrets.token_hex(8)
                file.truncate(0)
                file.write(known.encode())
        return known
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; make way for it, or leave out "
                          "--wandb") from None


def reachable(url: str, seconds: float = 5) -> bool:
    """ Whether something listens there, or at the proxy on the way. Looking up a name may take longer. """
    found = []

    def knock():
        try:
            parts = urlsplit(getproxies().get(urlsplit(url).scheme) or url)
            port = parts.port or (80 if parts.scheme == "http" else 443)
            socket.create_connection((parts.hostname, port), seconds).close()
            found.append(True)
        except (OSError, ValueError):       # ValueError: what is no address
            pass
    thread = Thread(target=knock, daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(found)


def one_line(error: Exception) -> str:
    """ What an error says, at most 150 characters of it. """
    return (" ".join(str(error).split()) or type(error).__name__)[:150]
