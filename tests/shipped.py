""" Which files are the project's, and not the reader's own beside them: a recipe to try, a list of runs. """
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def shipped(pattern: str) -> list[Path]:
    """ The files of a pattern such as configs/*.py that git knows; all of them where there is no git. """
    try:
        known = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z", "--", f":(glob){pattern}"],
                               capture_output=True, check=True, text=True).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        known = []
    return sorted(ROOT / name for name in known if (ROOT / name).is_file()) or sorted(ROOT.glob(pattern))
