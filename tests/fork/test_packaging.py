"""What the README, the images and the pipeline call is there: no file of them can be run where these tests run."""

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from email import message_from_bytes
from pathlib import Path

import pytest
import yaml
from dockerfile_parse import DockerfileParser
from packaging.requirements import Requirement
from support import run_fork

from fork import ROOT
from fork.__main__ import VERBS, main
from fork.bases import find_base

DOCKERFILES = {"cpu": ROOT / "docker/Dockerfile.cpu", "cuda": ROOT / "docker/Dockerfile"}
CALLERS = ("README.md", ".buildkite/pipeline.yml", ".ci/run", "docker/Dockerfile", "docker/Dockerfile.cpu")

#: What chooses the wheel that `make setup` installs.
SETTINGS = ("VLLM_FORK_BASE", "VLLM_TARGET_DEVICE")

#: The only host that a packaging file may name: PyTorch's own index of CPU builds.
HOSTS = {"download.pytorch.org"}


def _text(path: str) -> str:
    """A file with its lines joined and without its comment lines; of the README only what is marked as code."""
    text = (ROOT / path).read_text().replace("\\\n", " ")
    if path == "README.md":
        blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        return "\n".join([*blocks, *re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))])
    return re.sub(r"^#.*$", "", text, flags=re.MULTILINE)


def _stages(device: str) -> list[list[dict]]:
    """The instructions of each stage of a Dockerfile."""
    with DOCKERFILES[device].open("rb") as stream:
        instructions = [item for item in DockerfileParser(fileobj=stream).structure if item["instruction"] != "COMMENT"]
    stages: list[list[dict]] = []
    for item in instructions:
        if item["instruction"] == "FROM":
            stages.append([])
        stages[-1].append(item)
    return stages


def _values(stage: list[dict], instruction: str) -> list[str]:
    return [item["value"] for item in stage if item["instruction"] == instruction]


def _targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def _metadata(device: str):
    """METADATA of the base wheel that a Dockerfile builds from."""
    base = dict(value.split("=") for value in _values(_stages(device)[0], "ARG"))["BASE"]
    with find_base(base).wheel(device).open() as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_bytes(archive.read(name))


@pytest.mark.parametrize("path", CALLERS)
def test_every_make_target_is_in_the_makefile(path):
    called = set(re.findall(r"\bmake ([a-z-]+)\b", _text(path)))
    assert called <= _targets(), called - _targets()
    assert called or path.startswith("docker")


@pytest.mark.parametrize("path", CALLERS)
def test_every_verb_and_option_of_the_tool_is_there(path, capsys):
    for line in re.findall(r"python -m fork ([^#\n]*)", _text(path)):
        verb, *words = shlex.split(line)
        if verb == "--help":
            continue
        assert verb in VERBS, line
        with pytest.raises(SystemExit, match="0"):
            main([verb, "--help"])
        known = capsys.readouterr().out
        for option in (word for word in words if word.startswith("--")):
            assert re.search(rf"{option}\b", known), line


@pytest.mark.parametrize("path", CALLERS)
def test_every_module_that_python_runs_is_there(path):
    for module in re.findall(r"python[\d.]* -m ([\w.]+)", _text(path)):
        assert importlib.util.find_spec(module), module


def test_every_file_that_the_readme_names_is_there():
    text = (ROOT / "README.md").read_text()
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("https://")]
    inline = re.findall(r"`((?:docker|docs|fork|patches|tests)/[\w./-]+)`", text)
    assert links and inline
    for path in (*links, *inline):
        assert (ROOT / path).exists(), path


def test_the_python_of_the_readme_compiles_and_its_json_parses():
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    bodies = re.findall(r"'(\{.*?\})'", text)
    assert blocks and bodies
    for block in blocks:
        compile(block, "README.md", "exec")
    for body in bodies:
        assert json.loads(body)


def test_the_wheel_that_the_readme_installs_is_the_one_its_command_builds():
    base, device, name = re.search(
        r"fork build --base (\S+) --device (\S+)\npip install build/wheels/(\S+)", _text("README.md")
    ).groups()
    from fork.wheel import version_of

    source = find_base(base).wheel(device)
    assert name == source.file.replace(source.version, version_of(find_base(base), device), 1)


def test_pip_finds_the_build_backend():
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]
    backend = importlib.import_module(build["build-backend"])
    assert callable(backend.build_wheel)
    assert all("==" in requirement for requirement in build["requires"])


@pytest.mark.parametrize("device", DOCKERFILES)
class TestDockerfile:
    def test_it_builds_the_wheel_in_one_stage_and_serves_from_the_next(self, device):
        build, serve = _stages(device)
        command = next(value for value in _values(build, "RUN") if "python -m fork build" in value)
        assert f"--device {device} " in command
        assert any("from=build" in value and "/wheels/*.whl" in value for value in _values(serve, "RUN"))
        assert json.loads(_values(serve, "ENTRYPOINT")[0]) == ["vllm", "serve"]
        assert not _values(serve, "COPY")

    def test_its_images_are_pinned_by_tag(self, device):
        for stage in _stages(device):
            image = _values(stage, "FROM")[0].split()[0]
            name, _, tag = image.partition(":")
            assert "." not in name.split("/")[0], f"{image} names a registry"
            assert re.search(r"\d+\.\d+", tag), image

    def test_it_does_not_serve_as_root(self, device):
        _, serve = _stages(device)
        user = _values(serve, "USER")[-1]
        assert user != "root" and any(f"useradd --create-home {user}" in value for value in _values(serve, "RUN"))
        order = [item["instruction"] for item in serve]
        assert max(i for i, name in enumerate(order) if name == "RUN") < order.index("USER")

    def test_the_program_it_starts_comes_with_the_wheel(self, device):
        base = dict(value.split("=") for value in _values(_stages(device)[0], "ARG"))["BASE"]
        with find_base(base).wheel(device).open() as archive:
            name = next(name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt"))
            assert re.search(rb"^vllm *= *vllm\.", archive.read(name), re.MULTILINE)

    def test_its_python_is_one_that_the_base_is_for(self, device):
        allowed = Requirement(f"python{_metadata(device)['Requires-Python']}").specifier
        found = re.findall(r"\bpython:?(3\.\d+)", DOCKERFILES[device].read_text())
        assert found and all(allowed.contains(version) for version in found)

    def test_what_it_copies_is_enough_for_the_whole_series(self, device, tmp_path):
        """The sources that the first stage copies, less what .dockerignore keeps out, evaluate on the base."""
        build, _ = _stages(device)
        for value in _values(build, "COPY"):
            source, target = value.split()
            assert (ROOT / source).exists(), source
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, tmp_path / target, ignore=_docker_ignores)
            else:
                shutil.copy(ROOT / source, tmp_path / target)
        base = dict(value.split("=") for value in _values(build, "ARG"))["BASE"]
        done = run_fork(tmp_path, "status", "--base", base, "--json")
        assert done.status == 0, (done.out, done.err)
        assert {row["patch"] for row in done.json} == set((ROOT / "patches/series").read_text().split())


def _docker_ignores(folder: str, names: list[str]) -> set[str]:
    """What .dockerignore keeps out of `folder`. It has lines of four kinds: `*`, `!top`, `path`, `**/name`."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    here = Path(folder).relative_to(ROOT)
    assert lines[0] == "*" and f"!{here.parts[0]}" in lines, f"{here} is not sent"
    return {name for name in names if f"**/{name}" in lines or (here / name).as_posix() in lines}


def test_docker_sends_every_source_that_the_images_copy():
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for device in DOCKERFILES:
        assert {value.split()[0] for value in _values(_stages(device)[0], "COPY")} == allowed


def test_the_cuda_image_has_the_cuda_that_the_base_is_built_for():
    tag = _values(_stages("cuda")[1], "FROM")[0].partition(":")[2]
    wanted = {
        match[1] for line in _metadata("cuda").get_all("Requires-Dist") if (match := re.search(r"\[cu(\d+)", line))
    }
    assert {tag.split(".")[0]} == wanted
    packages = re.findall(r"-(\d+-\d+)\b", " ".join(_values(_stages("cuda")[1], "RUN")))
    assert packages and set(packages) == {"-".join(tag.split(".")[:2])}


def test_the_cpu_image_takes_torch_from_the_index_that_has_it():
    from fork.install import TORCH_CPU_INDEX

    torch = [line for line in _metadata("cpu").get_all("Requires-Dist") if line.startswith("torch==")]
    assert any("+cpu" in line for line in torch)
    assert any(f"--extra-index-url {TORCH_CPU_INDEX} " in value for value in _values(_stages("cpu")[1], "RUN"))


@pytest.mark.parametrize("path", CALLERS[1:])
def test_no_other_host_is_named(path):
    assert set(re.findall(r"https?://([^/\s]+)", (ROOT / path).read_text())) <= HOSTS


def test_every_step_of_the_pipeline_calls_something_that_is_there():
    steps = yaml.safe_load((ROOT / ".buildkite/pipeline.yml").read_text())["steps"]
    keys = {step["key"] for step in steps if "key" in step}
    called = set()
    for step in steps:
        command = shlex.split(step["command"])
        assert step.get("depends_on", "setup") in keys
        if command[0] == "make":
            called.add(command[1])
            assert command[1] in _targets(), command
        else:
            assert os.access(ROOT / command[0], os.X_OK), command
            called |= set(re.findall(r"\bmake ([a-z]+)", (ROOT / command[0]).read_text()))
    assert called >= {"setup", "lint", "test", "demo", "drop"}


def test_ci_runs_the_command_that_the_readme_gives():
    text = (ROOT / ".ci/run").read_text()
    assert text.startswith("#!/usr/bin/env bash\n") and "\nset -euo pipefail\n" in text
    assert text.splitlines()[-1] == "make test" and "\nmake test " in (ROOT / "README.md").read_text()
    assert subprocess.run(["bash", "-n", ROOT / ".ci/run"]).returncode == 0


def test_make_knows_how_to_make_every_target(tmp_path):
    """Asked without doing it, so that a target whose recipe names a missing target is seen too."""
    for target in sorted(_targets()):
        done = subprocess.run(
            ["make", "--dry-run", f"PYTHON={sys.executable}", target], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0 and done.stdout.strip(), (target, done.stderr)
        for module in re.findall(r"python3? -m ([\w.]+)", done.stdout):
            assert importlib.util.find_spec(module), (target, module)


@pytest.fixture
def checkout(tmp_path):
    """Just what the Makefile reads. `make --touch` marks a target as made without making it."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("fork", "patches", "vllm", ".venv"):
        (tmp_path / name).mkdir()
    return tmp_path


def _make(folder: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if key not in SETTINGS and not key.startswith("MAKE")}
    command = ["make", "--no-print-directory", f"PYTHON={sys.executable}", *args]
    return subprocess.run(command, cwd=folder, env=clean | env, capture_output=True, text=True)


@pytest.mark.parametrize("name", SETTINGS)
def test_setup_is_made_again_from_nothing_when_base_or_device_changes_and_only_then(checkout, name):
    for before, after in (({}, {name: "one"}), ({name: "one"}, {name: "two"}), ({name: "two"}, {})):
        assert _make(checkout, "--touch", "setup", **before).returncode == 0
        assert _make(checkout, "--question", "setup", **before).returncode == 0
        assert "-m fork install" in (planned := _make(checkout, "--dry-run", "setup", **after).stdout)
        # Nothing of the other environment stays, but a base that cannot be built leaves it as it is.
        assert planned.index("-m fork build") < planned.index("&& rm -rf .venv") < planned.index("-m venv .venv")
        shutil.rmtree(checkout / ".venv")
        (checkout / ".venv").mkdir()


def test_setup_keeps_the_environment_when_only_a_source_changed(checkout):
    assert _make(checkout, "--touch", "setup").returncode == 0
    os.utime(checkout / "pyproject.toml", (4e9, 4e9))
    planned = _make(checkout, "--dry-run", "setup").stdout
    assert "-m fork install" in planned and "rm -rf" not in planned


@pytest.mark.parametrize("python", ["false", "no-such-python"])
def test_setup_with_a_python_that_will_not_do_changes_nothing_and_says_so(checkout, python):
    done = _make(checkout, f"PYTHON={python}", "setup")
    assert done.returncode and f"{python} is no Python 3.11 or later; name one: make setup PYTHON=" in done.stderr
    assert "Traceback" not in done.stderr and not list((checkout / ".venv").iterdir())


def test_the_licence_is_the_one_of_the_bases():
    with find_base("0.32.0").wheel().open() as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/licenses/LICENSE"))
        assert archive.read(name) == (ROOT / "LICENSE").read_bytes()


def test_what_is_built_is_ignored_by_git(tmp_path):
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    shutil.copy(ROOT / ".gitignore", tmp_path)
    made = [".venv/bin/python", "build/wheels/x.whl", "fork/__pycache__/build.pyc", ".ruff_cache/x", ".mypy_cache/x"]
    kept = ["fork/build.py", "vllm/x.py", ".ci/run", "patches/series", "docker/Dockerfile"]
    for path in (*made, *kept):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    git = ("git", "-C", tmp_path, "ls-files", "--others", "--exclude-standard")
    listed = subprocess.run(git, capture_output=True, text=True, check=True)
    assert set(listed.stdout.split()) == {".gitignore", *kept}
