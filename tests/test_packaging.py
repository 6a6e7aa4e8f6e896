"""What is built, installed and imported: wheel and sdist, pinned versions, the cost of `import moekit`."""

from __future__ import annotations

import ast
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OWN_ENVIRONMENT = {"vllm"}  # extras that constraints.txt does not cover


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [p for p in listed.split("\n") if p and os.path.lexists(ROOT / p)]


def python(code: str, cwd: Path, **env: str) -> str:
    """Run code in a fresh interpreter, return what it prints."""
    return run("-c", code, cwd=cwd, env={**os.environ, **env})


def run(*arguments: str, cwd: Path, env: dict[str, str] | None = None, timeout: float = 250) -> str:
    """Run this interpreter; what it prints, or an assertion with all that it said."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """sdist, and the wheel built from it, of a copy of the tracked files; the folder that holds both."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("dist")
    for path in tracked():
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / path).is_symlink():
            (copy / path).symlink_to((ROOT / path).readlink())
        else:
            (copy / path).write_bytes((ROOT / path).read_bytes())
    run("-m", "build", "--no-isolation", "--outdir", str(out), str(copy), cwd=out)
    return out


def library_files() -> set[str]:
    """Tracked files of the three library folders, links left out."""
    return {p for p in tracked() if p.split("/")[0] in ("moekit", "kernels", "launch") and not (ROOT / p).is_symlink()}


def test_wheel_holds_exactly_the_tracked_files(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = {n for n in zipfile.ZipFile(wheel).namelist() if not n.endswith("/")}
    expected = {p if p.startswith("moekit/") else f"moekit/{p}" for p in library_files()}
    inside = {n for n in names if ".dist-info/" not in n}
    assert inside == expected, f"missing {sorted(expected - inside)}, too many {sorted(inside - expected)}"
    assert any(n.endswith("licenses/LICENSE") for n in names)


def test_sdist_holds_exactly_the_tracked_files(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {m.name.split("/", 1)[1] for m in archive.getmembers() if m.isfile()}
    inside = {n for n in names if n.split("/")[0] in ("moekit", "kernels", "launch")}
    assert inside == library_files(), f"differ in {sorted(inside ^ library_files())}"
    assert {"pyproject.toml", "README.md", "LICENSE"} <= names


# evaluated here and in other processes: the files that two imports come from
WHERE = "[__import__(n, fromlist=['_']).__file__ for n in ('moekit', 'moekit.kernels.reference', 'moekit.launch.job')]"


def test_wheel_works_without_the_tree(built: Path, tmp_path: Path) -> None:
    """Unpacked elsewhere, with the linked folders imported by their real names, also in a spawned process."""
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    (tmp_path / "elsewhere").mkdir()
    code = (
        "import json, multiprocessing\n"
        f"pool = multiprocessing.get_context('spawn').Pool(1)\n"
        f"print(json.dumps({WHERE} + pool.apply(eval, ({WHERE!r},))))\n"
        "pool.close(); pool.join()"
    )
    found = json.loads(python(code, tmp_path / "elsewhere", PYTHONPATH=str(tmp_path / "site")))
    inside = ["moekit/__init__.py", "moekit/kernels/reference.py", "moekit/launch/job.py"]
    assert found == [str(tmp_path / "site" / f) for f in inside * 2]


def test_spawned_workers_find_the_editable_install() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(eval, (WHERE,))
    inside = ["moekit/__init__.py", "kernels/reference.py", "launch/job.py"]
    assert [Path(f).resolve() for f in found] == [ROOT / f for f in inside]


def pins() -> dict[str, str]:
    """Package -> version of constraints.txt."""
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().split("\n")]
    found = {}
    for line in filter(None, lines):
        name, _, version = line.partition("==")
        assert version and canonicalize_name(name) not in found, f"constraints.txt: {line!r} is no single exact pin"
        found[canonicalize_name(name)] = version
    return found


def extras() -> dict[str, list[Requirement]]:
    """Extra -> its requirements; "" for the plain ones."""
    found = {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
    return {extra: [Requirement(r) for r in needs] for extra, needs in found.items()}


def test_constraints_pin_what_pyproject_names() -> None:
    pinned = pins()
    for extra, needs in extras().items():
        for need in needs if extra not in OWN_ENVIRONMENT else []:
            version = pinned.get(canonicalize_name(need.name))
            assert version, f"constraints.txt does not pin {need.name} (extra {extra!r})"
            assert need.specifier.contains(version), f"{need} excludes the tested version {version}"
    assert (pinned["torch"], pinned["triton"]) == ("2.13.0", "3.7.1")


def test_conda_environment_is_in_step() -> None:
    """environment.yml states no version but Python's; the rest comes from constraints.txt and existing extras."""
    conda = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert conda["name"] == "moekit"
    (pip,) = [d["pip"] for d in conda["dependencies"] if isinstance(d, dict)]
    plain = {d.split("=")[0]: d.partition("=")[2] for d in conda["dependencies"] if isinstance(d, str)}
    assert set(plain) == {"python", "pip"} and not plain["pip"], "packages belong into pyproject.toml"
    assert SpecifierSet(PROJECT["requires-python"]).contains(plain["python"])
    assert pip[0] == "-c constraints.txt" and len(pip) == 2
    chosen = re.fullmatch(r"-e \.\[([a-z,]+)\]", pip[1])
    assert chosen, f"expected one editable install of this folder, got {pip[1]!r}"
    makefile = (ROOT / "Makefile").read_text()
    assert f'$(INSTALL) ".[{chosen[1]}]"' in makefile, "conda users get what `make demo` installs"
    assert set(chosen[1].split(",")) <= set(PROJECT["optional-dependencies"])


HEAVY = ("plotly", "ipywidgets", "anywidget", "matplotlib", "transformers", "datasets", "tokenizers", "pandas")


def test_import_is_light(tmp_path: Path) -> None:
    """`import moekit` alone, then every public name that is not a picture: CPU time of its own beyond torch's.

    CPU time rather than wall time, the best of three, in shares of what `import torch` takes, so that neither a busy
    machine nor a slow one decides: where that took 1.2 s, these are 0.3 s and 0.55 s.
    """
    code = (
        "import json, sys, time, torch\n"
        "t = [time.process_time()]\n"
        "import moekit; t.append(time.process_time()); bare = set(sys.modules)\n"
        "pictures = ('show', 'live', 'dashboard', 'compare')\n"
        "[getattr(moekit, n) for n in moekit.__all__ if n not in pictures]; t.append(time.process_time())\n"
        f"print(json.dumps([(t[1] - t[0]) / t[0], (t[2] - t[0]) / t[0], [m for m in {HEAVY!r} if m in bare],\n"
        f"    [m for m in {HEAVY!r} if m in sys.modules], torch.cuda.is_initialized()]))"
    )
    for _ in range(3):
        bare, named, at_import, at_use, cuda = json.loads(python(code, tmp_path))
        if bare < 0.25 and named < 0.45:
            break
    assert bare < 0.25, f"import moekit took {bare:.0%} of what torch takes"
    assert named < 0.45, f"loading the public names took {named:.0%} of what torch takes, beyond it"
    assert not at_import, f"import moekit loads {at_import}"
    assert not at_use, f"the public names load {at_use}"
    assert not cuda, "something started CUDA"


def test_import_does_without_torch(tmp_path: Path) -> None:
    """The notebook's process submits jobs without loading torch, and so without CUDA."""
    out = python("import sys, moekit; moekit.submit, moekit.attach; print('torch' in sys.modules)", tmp_path)
    assert out == "False"


# whether Transformers takes `kernels` for installed, and which file it ran under that name (a bare folder runs none)
TRANSFORMERS = (
    "import json, sys, transformers, transformers.utils as u\n"
    "found = u.is_kernels_available()\n"
    "print(json.dumps([found, getattr(sys.modules.get('kernels'), '__file__', None), 'moekit' in sys.modules]))"
)


def test_transformers_is_undisturbed_from_the_root(tmp_path: Path) -> None:
    """`import transformers` in this folder finds the same `kernels` package (or none) as anywhere else."""
    here, elsewhere = python(TRANSFORMERS, ROOT), python(TRANSFORMERS, tmp_path)
    assert json.loads(here) == json.loads(elsewhere)


def test_a_package_named_kernels_wins_over_our_folder(tmp_path: Path) -> None:
    """With that project installed, the root first on sys.path still gives that project, not our folder."""
    for name in ("kernels", "launch"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("OTHERS = True\n")
    out = python("import kernels, launch; print(kernels.OTHERS, launch.OTHERS)", ROOT, PYTHONPATH=str(tmp_path))
    assert out == "True True"


def test_public_names_exist() -> None:
    import moekit

    for name in moekit.__all__:
        assert getattr(moekit, name) is not None
    assert dir(moekit) == sorted(moekit.__all__)
    assert set(moekit._HOMES) | {"__version__"} == set(moekit.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Lerner'"):
        getattr(moekit, "Lerner")  # noqa: B009


def typed_names() -> set[str]:
    """Names that type checkers see: those of the TYPE_CHECKING block."""
    tree = ast.parse((ROOT / "moekit/__init__.py").read_text())
    (block,) = [n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    return {a.name for n in block.body if isinstance(n, ast.ImportFrom) for a in n.names}


def test_type_checkers_see_the_public_names() -> None:
    import moekit

    assert typed_names() == set(moekit._HOMES)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_pyright_finds_no_error() -> None:
    pyright = [sys.executable, "-m", "pyright"]
    if subprocess.run([*pyright, "--version"], capture_output=True, check=False).returncode:
        pytest.skip("pyright cannot start: it needs node, or a network to fetch it once")
    run(*pyright[1:], "--pythonpath", sys.executable, cwd=ROOT, timeout=850)
