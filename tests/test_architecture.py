"""The shape of the tree: data and imports flow one way, files and functions stay small."""

import ast
import importlib.util
import re
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "hot_compile": "hot_compile",
    "passes": "hot_compile.passes",
    "runtime": "hot_compile.runtime",
}
LEAVES = {f"hot_compile.{name}" for name in ("errors", "config", "parsers", "sizes", "progress")}
FILE_CAP, FUNCTION_CAP = 500, 100


def modules():
    for folder, package in PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            yield ".".join((package, *(part for part in parts if part != "__init__"))), path


def test_every_package_is_installed():
    assert set(listed("packages")) == {name for name, path in modules() if path.stem == "__init__"}


def imports(name, path, for_types=False):
    """Absolute names of our modules that this one imports, inside functions too.

    What only a type checker imports is left out, unless ``for_types``.
    """
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if for_types else statements(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def statements(node):
    """Every node below this one but the bodies of ``if TYPE_CHECKING``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from statements(child)


def listed(name):
    """A list of pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text()  # tomllib comes with Python 3.11
    return ast.literal_eval(re.search(rf"^{name} = (\[.*?^\])", text, re.M | re.S).group(1))


OPTIONAL = {
    "matplotlib": "pictures, where a user asks for one",
    "accelerate": "its own plugin",
    "triton": "comes with torch, for GPUs",
}


def test_only_what_is_declared_is_imported():
    """A wheel in an environment of its own has nothing else."""
    declared = {re.match(r"[\w-]+", text).group() for text in listed("dependencies")}
    known = {*declared, *OPTIONAL, *sys.stdlib_module_names, "functorch", *PACKAGES}
    used = {
        (name.split(".")[0], path) for module, path in modules() for name in imports(module, path)
    }
    assert not {(str(path), name) for name, path in used if name not in known}


ROOMS = {"hot_compile.runtime"}, {"hot_compile.passes"}
BELOW_BACKEND = {
    f"hot_compile.{name}"
    for name in (
        *("observing", "memory", "graphs", "record", "detached_logits", "frameworks"),
        *("budget", "figures", "generated", "frames", "launches", "inductor", "unchanged"),
        *("stand_in", "again", "guarantee", "reproduction", "together"),
        *("attention", "attention_heads", "attention_masks"),
    )
}
TOP = 5


def layer(name):
    """How far up a module stands in DESIGN.md's picture of imports."""
    if name in LEAVES:
        return 0
    for depth, prefixes in enumerate((*ROOMS, BELOW_BACKEND, {"hot_compile.backend"}), 1):
        if any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes):
            return depth
    return TOP


@pytest.mark.parametrize(("name", "path"), list(modules()), ids=lambda v: str(v).split("/")[-1])
def test_imports_go_one_way(name, path):
    known = {module for module, _ in modules()}
    for imported in imports(name, path):
        if imported in known and imported != "hot_compile":
            assert layer(imported) <= layer(name), f"{name} imports {imported}"


ORDER = (
    {"base"},
    {"layers", "profile"},
    {"cost"},
    {"exact"},
    {"forward", "head"},
    {"storage"},
    {"measure"},
    {"passes"},
)
"""The rooms of passes/, lowest first; last, the files above all rooms."""
MOST_FLAT = 12


def room(name):
    """The room of passes/ that a module lies in; None: not one of passes/."""
    parts = name.split(".")[1:]
    if parts[:1] != ["passes"] or parts == ["passes"]:
        return None
    return parts[1] if (ROOT / "passes" / parts[1]).is_dir() else "passes"


def test_rooms_of_passes_import_downwards():
    """From lower rooms only, and what one room knows of another goes one way."""
    known = {module for module, _ in modules()}
    height = {name: place for place, rooms in enumerate(ORDER) for name in rooms}
    wrong = [
        f"{name} imports {other}"
        for name, path in modules()
        if (mine := room(name))
        for other in imports(name, path, for_types=True)
        if other in known and (its := room(other)) and its != mine
        if height[its] >= height[mine]
    ]
    assert not wrong


def test_no_package_imports_itself_in_a_circle():
    """Of observing, integrations and the rooms of runtime/; leaves, and a package's top, may be
    imported by all that lies in it.
    """
    known = {name: path for name, path in modules() if path.stem != "__init__"}
    needs: dict[str, set[str]] = {}
    for name, path in known.items():
        others = {n for n in imports(name, path, for_types=True) if n in known} - LEAVES
        package = name.rpartition(".")[0]
        needs.setdefault(package, set()).update(n.rpartition(".")[0] for n in others)
        needs[package] -= {package, *PACKAGES.values()}
    while free := {name for name, others in needs.items() if not others & needs.keys()}:
        needs = {name: others for name, others in needs.items() if name not in free}
    assert not needs, f"each of these imports another of them: {sorted(needs)}"


def test_few_files_of_passes_lie_flat():
    assert len(list((ROOT / "passes").glob("*.py"))) <= MOST_FLAT


def test_every_room_and_file_of_the_top_has_its_place_in_the_design():
    """A newcomer who reads DESIGN.md meets all of them."""
    text = (ROOT / "DESIGN.md").read_text()
    places = [path for folder in PACKAGES for path in (ROOT / folder).iterdir()]
    names = {p.stem for p in places if p.suffix == ".py" or (p / "__init__.py").exists()}
    names = {name for name in names if not name.startswith("__")}
    assert not {name for name in names if not re.search(rf"\b{name}\b", text)}


def test_no_file_imports_itself_in_a_circle():
    known = {module for module, _ in modules()} - set(PACKAGES.values())
    needs = {name: set(imports(name, path)) & known - {name} for name, path in modules()}
    while free := {name for name, others in needs.items() if not others & needs.keys()}:
        needs = {name: others for name, others in needs.items() if name not in free}
    assert not needs, f"each of these imports another of them: {sorted(needs)}"


ELSEWHERE = {
    "test_cli": "cli/doctor cli/profile",
    "test_planning": "cli/plans stock",
    "test_tuned": "cli/rates cost/devices",
    "test_memory": "accounting",
    "test_guarantee": "again reproduction hooks",
    "test_head_models": "detached_logits frameworks",
    "test_trainers": "integrations/accelerate",
    "test_calibration": "observing/collector profile/profile",
    "test_acceptance": "observing/eager base/files",
    "test_stretches": "observing/draws",
    "test_backend": "inspect context inductor",
    "test_frames": "hot_compile/generated",
    "test_pipeline": "passes/stages",
    "test_certificate": "observing/evidence",
    "test_raising": "observing/gauge",
    "test_monitor": "observing/watching",
    "test_page": "timeline storage/record",
    "test_errors": "option_warnings",
    "test_strategies": "base/emit cost/linear measure/linear",
    "test_match": "base/site",
    "test_plan": "layers/decision",
    "test_golden": "layers/rewrite",
    "test_conv_models": "layers/rewrite_conv",
    "test_stems": "exact/forms",
    "test_product": "forward/choose measure/observe",
    "test_head": "head/chunks head/find head/fused head/operands head/plan head/sizes head/rewrite",
    "test_head_forms": "head/facts head/parts head/rules",
    "test_head_losses": "head/proportional head/softmax head/bodies head/rows",
    "test_tolerance": "storage/chain",
    "test_schemes": "storage/offers",
    "test_store": "storage/crossers",
    "test_advance": "storage/cut",
    "test_prices": "storage/choose",
    "test_budget": "storage/fit_budget storage/predicted_peak",
    "test_pack": "storage/layout coding",
    "test_functions": "runtime/pointwise",
    "test_build": "native/extensions",
    "test_cuda_compiles": "native/toolkit",
    "test_reference": "arithmetic reference/gemm reference/storage two_reads reference/sizes",
}
"""By file of tests: modules without one of their name, whose work shows in something whole."""


def test_tests_have_the_names_of_modules():
    """``test_<module>``, or ``test_<room>_<module>``, or where ``ELSEWHERE`` says."""
    tests = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    paths = [path for _, path in modules() if not path.stem.startswith("__")]
    assert ELSEWHERE.keys() <= tests
    listed = {f"/{name}": False for names in ELSEWHERE.values() for name in names.split()}
    for path in paths:
        place = "/" + str(path.relative_to(ROOT).with_suffix(""))
        named = tests & {f"test_{path.stem}", f"test_{path.parent.stem}_{path.stem}"}
        found = [name for name in listed if place.endswith(name)]
        listed.update(dict.fromkeys(found, True))
        assert named or found or path.stem == "testing", f"{place} has no tests"
    assert all(listed.values()), f"no such module: {[n for n, seen in listed.items() if not seen]}"


def sources():
    for pattern in ("*.py", "*.cpp", "*.hpp", "*.inl", "*.cu", "*.cuh"):
        for path in ROOT.rglob(pattern):
            if not any(part.startswith(".") or part in ("build", "dist") for part in path.parts):
                yield path


def test_files_are_small():
    long = {str(p): n for p in sources() if (n := len(p.read_text().splitlines())) > FILE_CAP}
    assert not long


def test_functions_are_small():
    long = []
    for path in sources():
        if path.suffix != ".py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or node.lineno) - node.lineno
                if length > FUNCTION_CAP:
                    long.append(f"{path}:{node.lineno} {node.name} {length}")
    assert not long


@pytest.mark.parametrize("name", ["passes", "runtime"])
def test_bare_names_refuse_to_import(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / name / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.raises(ImportError, match=f"hot_compile.{name}"):
        spec.loader.exec_module(module)


def dotted(node):
    """``a.b.c`` as ["a", "b", "c"]; empty if it is anything else."""
    if isinstance(node, ast.Name):
        return [node.id]
    front = dotted(node.value) if isinstance(node, ast.Attribute) else []
    return [*front, node.attr] if front else []


def used_of_ours(tree):
    """(module, dotted name) of what a file takes from our modules, or replaces there."""
    known = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "hot_compile":
            for alias in node.names:
                known[alias.asname or alias.name] = node.module, alias.name
                yield known[alias.asname or alias.name]
    for node in ast.walk(tree):
        chain = dotted(node)
        replaced = isinstance(node, ast.Call) and dotted(node.func)[-1:] == ["setattr"]
        if replaced and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            chain = [*dotted(node.args[0]), node.args[1].value]
        if len(chain) > 1 and chain[0] in known:
            module, name = known[chain[0]]
            yield module, ".".join((name, *chain[1:]))


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("*.py")), ids=lambda p: p.stem)
def test_what_tests_use_is_there(path):
    """Of those for GPUs, too, which are seldom run."""
    for module, name in used_of_ours(ast.parse(path.read_text())):
        found = importlib.import_module(module)
        for part in name.split("."):
            if isinstance(found, types.ModuleType) and not hasattr(found, part):
                importlib.import_module(f"{found.__name__}.{part}")
            if not isinstance(found, (types.ModuleType, type)):
                break
            found = getattr(found, part)
