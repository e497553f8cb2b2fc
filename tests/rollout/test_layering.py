"""Dependencies run one way: storage <- rollout <- actors; and what only some need is imported where it is needed."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("storage", "rollout", "actors")
HEAVY = {"torch", "transformers", "ray"}
MODULES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
TORCH_IN_STORAGE = ("storage/torch_view.py", "storage/torch_stream.py")  # imported when a method needs them


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def of(package: str) -> list[Path]:
    return [path for path in MODULES if name(path).startswith(f"{package}/")]


def imports(path: Path, everywhere: bool) -> Iterator[tuple[str, str]]:
    """(top-level package, enclosing function or '') of each import; type-checking blocks are no imports."""

    def visit(node: ast.AST, scope: str) -> Iterator[tuple[str, str]]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, ast.Import):
            yield from ((alias.name.partition(".")[0], scope) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0], scope
        inner = scope
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{scope}.{node.name}".lstrip(".")
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not everywhere:
            return
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inner)

    yield from visit(ast.parse(path.read_text()), "")


def test_the_three_packages_are_found():
    assert {name(path).partition("/")[0] for path in MODULES} == set(PACKAGES)
    assert len(MODULES) > 40


@pytest.mark.parametrize("path", of("storage"), ids=name)
def test_storage_knows_neither_rollout_nor_actors(path):
    assert not {"rollout", "actors"} & {package for package, _ in imports(path, everywhere=True)}


@pytest.mark.parametrize("path", of("storage"), ids=name)
def test_storage_loads_without_torch_transformers_and_ray(path):
    found = {package for package, _ in imports(path, everywhere=False)} & HEAVY
    assert found == ({"torch"} if name(path) in TORCH_IN_STORAGE else set())
    assert not {"transformers", "ray"} & {package for package, _ in imports(path, everywhere=True)}


def test_rollout_knows_actors_in_one_place_only():
    users = {
        (name(path), scope)
        for path in of("rollout")
        for package, scope in imports(path, everywhere=True)
        if package in ("actors", "ray")
    }
    assert users == {("rollout/client.py", "RolloutClient.ray")}


def loaded(statement: str) -> set[str]:
    """Which of the heavy packages a fresh interpreter has loaded after `statement`."""
    code = f"import sys\n{statement}\nprint(*({HEAVY} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    return set(out.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import storage",
        "from storage import RoutingSpec, Trace, TraceDataset, TraceWriter, ReplayBatch",
        "import rollout; from rollout import SamplingParams",
        "import rollout.config, rollout.requests, rollout.steps, rollout.backend",
        "import rollout.__main__",
        "import rollout.tiny_moe",
    ],
)
def test_what_must_start_fast_loads_nothing_heavy(statement):
    assert loaded(statement) == set()


def test_sampling_in_process_needs_no_ray():
    assert "ray" not in loaded("from rollout import RolloutClient, RouterReplay")


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_no_pickle_is_read_anywhere(path):
    tree = ast.parse(path.read_text())
    assert not {"pickle", "cloudpickle", "dill", "joblib", "shelve"} & {p for p, _ in imports(path, everywhere=True)}
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert not calls & {"torch.load", "np.load", "numpy.load", "eval", "exec"}


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_no_finalizers_and_no_swallowed_errors(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            assert node.name != "__del__"
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"line {node.lineno}: a bare except"
            assert not all(isinstance(line, ast.Pass) for line in node.body), (
                f"line {node.lineno}: an error is swallowed"
            )
