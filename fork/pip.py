"""The only module that calls pip."""

import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.utils import parse_wheel_filename

from fork.errors import ForkError, one_line


def run(*args: str) -> str:
    """Run pip with `args`; return what it printed. Raise ForkError with pip's last error line when it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", *args],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr or done.stdout]
        raise ForkError(f"pip {args[0]} failed: {one_line(said[0])}")
    return done.stdout


def download(distribution: str, version: str, file: str, sha256: str, folder: Path) -> None:
    """Download one wheel, chosen by the tags of its file name and checked against its hash, into `folder`."""
    tag = sorted(parse_wheel_filename(file)[3], key=str)[0]
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        lock = Path(scratch, "requirements.txt")
        lock.write_text(f"{distribution}=={version} --hash=sha256:{sha256}\n")
        try:
            run(
                *("download", "--quiet", "--require-hashes", "--no-deps", "--only-binary", ":all:"),
                *("--implementation", "cp", "--python-version", "3.12", "--abi", tag.abi, "--platform", tag.platform),
                *("--dest", scratch, "--requirement", str(lock)),
            )
        except ForkError as error:
            why = f"{error}; check the network and pip's index, then try again"
            if "MATCH THE HASHES" in str(error):
                why = f"the index has another hash than the {sha256[:12]}.. of fork/bases.toml; see which is right"
            raise ForkError(f"cannot fetch {file}: {why}") from None
        fetched = Path(scratch, file)
        if not fetched.exists():
            names = ", ".join(sorted(path.name for path in Path(scratch).glob("*.whl"))) or "nothing"
            raise ForkError(f"cannot fetch {file}: the index gave {names}; correct the pin in fork/bases.toml")
        fetched.replace(folder / file)


def offers(distribution: str, version: str) -> bool:
    """Whether the indexes that pip is set up to use have this version of a distribution for this interpreter."""
    try:
        return version in run("index", "versions", distribution).replace(",", " ").split()
    except ForkError:
        return False


def install(*args: str) -> None:
    """pip install `args` into the environment of the running interpreter, showing on stderr what pip says."""
    command = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", "install", *args]
    if subprocess.run(command, stdout=sys.stderr).returncode:
        raise ForkError(f"pip could not install {args[-1]}; its reason is above")
