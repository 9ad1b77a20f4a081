"""Lifting from small trees: what comes along, what is dropped, what is refused."""

from __future__ import annotations

import dataclasses
import inspect
import os
import subprocess
import sys
import traceback

import pytest

from specmortem import upstream
from specmortem.errors import BadInputError

KERNELS = """\
import torch

from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.v1.helpers import PAD, double

LIMIT: tl.constexpr = 8


@triton.jit
def shift(x, by):
    return double(x) + by


@triton.jit(do_not_specialize=["n"])
def kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n, other=0)
    tl.store(y_ptr + offsets, tl.minimum(shift(x, 1), LIMIT), mask=offsets < n)


@torch.compile(dynamic=True, backend=current_platform.simple_compile_backend)
def launch(x: torch.Tensor, y: "NoSuchType") -> current_platform.Tensor:
    y.fill_(PAD)
    kernel[(1,)](x, y, x.shape[0], BLOCK=16)
    return y
"""
HELPERS = """\
from vllm.triton_utils import tl, triton

PAD = -1


@triton.jit
def double(x):
    return x * 2
"""


@pytest.fixture
def kernels(make_tree):
    return make_tree({"vllm/v1/kernels.py": KERNELS, "vllm/v1/helpers.py": HELPERS})


def lift(make_tree, text, name="f", provide=None, **others):
    files = {f"vllm/{other}.py": content for other, content in others.items()}
    return upstream.lift(make_tree({"vllm/m.py": text, **files}), "vllm/m.py", name, provide)


def test_a_launcher_brings_its_kernels_and_constants(kernels):
    lifted = upstream.lift(kernels, "vllm/v1/kernels.py", "launch")
    assert set(lifted.requires) == {"kernel", "shift", "double", "LIMIT", "PAD"}
    assert lifted.stripped == ("torch.compile",)
    assert lifted.missing == {}
    assert (lifted.name, lifted.path, lifted.line) == ("launch", "vllm/v1/kernels.py", 23)
    assert lifted.namespace["PAD"] == -1


def test_a_kernel_keeps_its_signature_place_and_source(kernels):
    lifted = upstream.lift(kernels, "vllm/v1/kernels.py", "kernel")
    function = lifted.function.fn
    assert list(inspect.signature(function).parameters) == ["x_ptr", "y_ptr", "n", "BLOCK"]
    assert inspect.signature(function).parameters["BLOCK"].annotation is lifted.namespace["tl"].constexpr
    lines, first = inspect.getsourcelines(function)
    assert (first, lines[1][:10]) == (15, "def kernel")
    assert (lifted.line, lifted.end_line) == (16, 19)
    assert inspect.getsourcefile(function) == str(kernels.root / "vllm/v1/kernels.py")


def test_annotations_of_plain_functions_are_gone(kernels):
    assert upstream.lift(kernels, "vllm/v1/kernels.py", "launch").function.__annotations__ == {}


def test_a_lifted_launcher_runs_in_the_interpreter(kernels):
    code = (
        "import sys, torch; from specmortem import upstream\n"
        "f = upstream.lift(upstream.resolve(sys.argv[1]), 'vllm/v1/kernels.py', 'launch').function\n"
        "print(f(torch.arange(6), torch.zeros(8, dtype=torch.int64)).tolist())"
    )
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [sys.executable, "-c", code, kernels.subject]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("[1, 3, 5, 7, 8, 8, -1, -1]\n", 0), done.stderr


def test_a_traceback_shows_the_line_of_the_tree(make_tree):
    f = lift(make_tree, "\n\n@override\ndef f(x: int):\n\n    return 1 / x\n").function
    with pytest.raises(ZeroDivisionError) as caught:
        f(0)
    frame = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (frame.lineno, frame.line, frame.filename[-4:]) == (6, "return 1 / x", "m.py")


def test_a_name_that_the_tree_does_not_define_is_told_apart(make_tree):
    with pytest.raises(upstream.NotPresentError, match=r"vllm/m\.py does not define g"):
        lift(make_tree, "def f():\n    return 1\n", "g")


def test_a_name_that_is_only_imported_is_not_defined_there(make_tree):
    with pytest.raises(upstream.NotPresentError):
        lift(make_tree, "from vllm.n import f\n", n="def f():\n    return 1\n")


def test_a_file_that_the_tree_lacks_is_told_apart(make_tree):
    with pytest.raises(upstream.NotPresentError, match=r"has no file vllm/none\.py"):
        upstream.lift(make_tree({"vllm/m.py": ""}), "vllm/none.py", "f")


def test_a_file_that_does_not_parse_is_a_lift_error(make_tree):
    with pytest.raises(upstream.LiftError, match=r"vllm/m\.py cannot be parsed by this Python"):
        lift(make_tree, "def f(:\n")


def test_each_file_keeps_its_own_globals(make_tree):
    text = "from vllm.n import g\nK = 1\ndef f():\n    return K, g()\n"
    assert lift(make_tree, text, n="K = 2\ndef g():\n    return K\n").function() == (1, 2)


@pytest.mark.parametrize(
    "statement", ["from .pkg import g", "from vllm.pkg import g", "from vllm.pkg import h as g"]
)
def test_reexports_are_followed(make_tree, statement):
    files = {
        "vllm/m.py": f"{statement}\ndef f():\n    return g()\n",
        "vllm/pkg/__init__.py": "from .deep import *\nfrom vllm.pkg.deep import g as h\n",
        "vllm/pkg/deep.py": "from ..other import g\n",
        "vllm/other.py": "def g():\n    return 7\n",
    }
    assert upstream.lift(make_tree(files), "vllm/m.py", "f").function() == 7


def test_files_that_import_each_other_are_lifted(make_tree):
    text = "from vllm.n import g\ndef f(x):\n    return x if x < 1 else g(x - 1)\n"
    assert lift(make_tree, text, n="from vllm.m import f\ndef g(x):\n    return f(x)\n").function(5) == 0


def test_a_name_that_imports_itself_is_missing(make_tree):
    lifted = lift(make_tree, "from vllm.n import g\ndef f():\n    return g\n", n="from vllm.m import g\n")
    assert "imports g from itself" in lifted.missing["g"]


def test_an_unused_missing_name_harms_nothing_and_a_used_one_says_what_it_is(make_tree):
    text = "from vllm.gone import g\ndef f(use):\n    x = g\n    return g.attribute + 1 if use else 3\n"
    lifted = lift(make_tree, text)
    assert lifted.function(False) == 3
    assert "has no module vllm.gone" in lifted.missing["g"]
    with pytest.raises(upstream.LiftError, match=r"uses g, which was not lifted: .*has no module vllm\.gone"):
        lifted.function(True)


@pytest.mark.parametrize(
    "use",
    [
        "g()",
        "g.a",
        "g[0]",
        "g + 1",
        "1 - g",
        "g == 1",
        "x < g",
        "isinstance(x, g)",
        "[*g]",
        "bool(g)",
        "f'{g.a}'",
    ],
)
def test_no_use_of_a_missing_name_goes_unnoticed(make_tree, use):
    with pytest.raises(upstream.LiftError):
        lift(make_tree, f"from vllm.gone import g\ndef f(x):\n    return {use}\n").function(1)


def test_provided_names_replace_what_would_be_lifted(make_tree):
    text = (
        "from vllm.gone import g\ndef f():\n"
        "    from vllm.platforms import current_platform as p\n    return g(), p\n"
    )
    lifted = lift(make_tree, text, provide={"g": lambda: 4, "current_platform": "cuda"})
    assert lifted.function() == (4, "cuda")
    assert lifted.missing == {}


def test_imports_inside_functions_are_lifted_too(make_tree):
    text = "def f():\n    from vllm.n import g as h\n    import math\n    return h() + math.floor(0.5)\n"
    lifted = lift(make_tree, text, n="def g():\n    return 2\n")
    assert (lifted.function(), lifted.requires) == (2, ("g",))


def test_vllm_itself_is_never_imported(make_tree):
    text = (
        "import vllm.envs as envs\nimport vllm\ndef f():\n    import vllm.x as x\n    return envs, vllm, x\n"
    )
    assert len(lift(make_tree, text).missing) == 3
    assert "vllm" not in sys.modules


def test_packages_outside_the_known_ones_are_not_imported(make_tree):
    lifted = lift(make_tree, "import pytest as p\nimport math\ndef f():\n    return math.pi, p\n")
    assert lifted.missing == {"p": "package pytest is not lifted"}


def test_triton_utils_as_a_module_is_the_installed_triton(make_tree):
    import triton

    text = (
        "import vllm.triton_utils as tu\nfrom vllm import triton_utils\n"
        "def f():\n    return tu.triton, triton_utils.tl\n"
    )
    assert lift(make_tree, text).function() == (triton, triton.language)


def test_loggers_do_not_need_vllm(make_tree, caplog):
    text = (
        "from vllm.logger import init_logger\nlogger = init_logger(__name__)\n"
        "def f():\n    logger.warning_once('x')\n"
    )
    lift(make_tree, text).function()
    assert [(record.name, record.message) for record in caplog.records] == [("lifted.vllm.m", "x")]


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("HAS_TRITON", 1),
        ("not HAS_TRITON", 2),
        ("TYPE_CHECKING or HAS_TRITON", 1),
        ("current_platform.is_cuda()", 1),
        ("current_platform.is_rocm()", 2),
        ("os.environ.get('FAST', '0') == '1'", 2),
        ("unknown() and current_platform.is_cpu()", 2),
        ("unknown()", 1),
    ],
)
def test_conditions_are_decided_for_cuda_and_vllms_defaults(make_tree, condition, expected):
    text = f"if {condition}:\n    def f():\n        return 1\nelse:\n    def f():\n        return 2\n"
    assert lift(make_tree, text).function() == expected


def test_a_redefinition_for_another_platform_does_not_count(make_tree):
    text = "def f():\n    return 1\nif current_platform.is_cpu():\n    from vllm.cpu import f_cpu as f\n"
    assert lift(make_tree, text).function() == 1


def test_a_failed_import_falls_back_on_its_handler(make_tree):
    text = "try:\n    from flash_x import g\nexcept ImportError:\n    g = None\ndef f():\n    return g\n"
    assert lift(make_tree, text).function() is None


def test_a_name_that_wraps_itself_is_wrapped(make_tree):
    text = "import functools\ndef f(x):\n    return x + 1\nf = functools.partial(f, 2)\n"
    assert lift(make_tree, text).function() == 3


def test_what_runs_at_definition_comes_first(make_tree):
    text = (
        "def f(x=None, k=[K for _ in range(2)]):\n    return k\nK = g(3)\n"
        "def g(x):\n    return x * h()\ndef h():\n    return 2\n"
    )
    lifted = lift(make_tree, text)
    assert lifted.function() == [6, 6]
    assert lifted.requires == ("g", "h", "K")


def test_assigning_to_an_attribute_defines_nothing(make_tree):
    text = "import types\nbox = types.SimpleNamespace()\nbox.x = 1 / 0\ndef f():\n    return box\n"
    assert lift(make_tree, text).missing == {}


def test_known_decorators_are_kept(make_tree):
    text = "import functools\n@functools.lru_cache(maxsize=None)\ndef f():\n    return object()\n"
    lifted = lift(make_tree, text)
    assert lifted.function() is lifted.function()
    assert lifted.stripped == ()


@pytest.mark.parametrize(
    "decorator",
    [
        "torch.compile",
        "torch.compile(mode='x')",
        "torch.inference_mode()",
        "support_torch_compile",
        "override",
        "gone.x(1)",
    ],
)
def test_platform_decorators_are_dropped_and_named(make_tree, decorator):
    lifted = lift(make_tree, f"import torch\nfrom vllm import gone\n@{decorator}\ndef f():\n    return 1\n")
    assert lifted.function() == 1
    assert lifted.stripped == (decorator.partition("(")[0],)


def test_a_dataclass_keeps_its_fields_without_their_types(make_tree):
    text = (
        "from __future__ import annotations\nfrom dataclasses import dataclass, field\n"
        "from typing import ClassVar\n@dataclass\nclass f:\n    a: gone.Type\n"
        "    b: list[int] = field(default_factory=list)\n    c: ClassVar[gone.Type] = 3\n"
        "    def total(self) -> gone.Type:\n        return self.a + self.c\n"
        "    @property\n    def size(self):\n        return len(self.b)\n"
    )
    made = lift(make_tree, text).function(4)
    assert ([each.name for each in dataclasses.fields(made)], made.total(), made.size) == (["a", "b"], 7, 0)


def test_names_of_a_class_body_are_its_own(make_tree):
    text = "import enum\nclass f(enum.Enum):\n    NONE = 0\n    FULL = 1\n    BOTH = (NONE, FULL)\n"
    lifted = lift(make_tree, text)
    assert (lifted.function.BOTH.value, lifted.missing) == ((0, 1), {})


def test_a_dependency_that_cannot_run_is_a_placeholder(make_tree):
    lifted = lift(make_tree, "TABLE = open('/no/such/file')\ndef f(use):\n    return TABLE.x if use else 1\n")
    assert lifted.function(False) == 1
    assert "FileNotFoundError" in lifted.missing["TABLE"]
    with pytest.raises(upstream.LiftError, match="TABLE"):
        lifted.function(True)


def test_a_target_that_cannot_run_is_a_lift_error(make_tree):
    with pytest.raises(upstream.LiftError, match=r"f \(vllm/m\.py:2\) cannot run outside vLLM: .*Base"):
        lift(make_tree, "from vllm.gone import Base\nclass f(Base):\n    pass\n")


def test_too_many_dependencies_are_refused(make_tree):
    many = "".join(f"def f{n}():\n    return {n}\n" for n in range(450))
    calls = ", ".join(f"f{n}()" for n in range(450))
    with pytest.raises(upstream.LiftError, match="needs more than 400 definitions"):
        lift(make_tree, f"{many}def f():\n    return {calls}\n")


def test_dependencies_that_nest_too_deeply_are_refused(make_tree):
    chain = "".join(f"def f{n}():\n    return f{n + 1}()\n" for n in range(390))
    with pytest.raises(upstream.LiftError, match="nest too deeply"):
        lift(make_tree, chain, "f0")


def test_a_file_that_postpones_annotations_keeps_them_as_text(make_tree):
    text = (
        "from __future__ import annotations\nfrom vllm.triton_utils import tl, triton\n"
        "LIMIT: tl.constexpr = 3\n"
        "@triton.jit\ndef f(x, B: tl.constexpr):\n    return x + LIMIT\n"
    )
    lifted = lift(make_tree, text)
    assert inspect.signature(lifted.function.fn).parameters["B"].annotation == "tl.constexpr"
    assert lifted.namespace["__annotations__"] == {"LIMIT": "tl.constexpr"}


METHODS = """\
class Runner:
    def __init__(self, config: Config):
        raise AssertionError

    @torch.inference_mode()
    def step(self, x: int) -> int:
        return self.__scale * x + offset()

    @staticmethod
    def plain(x):
        return x

def offset():
    return 1
"""


def test_a_method_runs_on_a_stand_in_for_self(make_tree):
    tree = make_tree({"vllm/m.py": METHODS})
    lifted = upstream.lift_method(tree, "vllm/m.py", "Runner.step")

    class StandIn:
        _Runner__scale = 10

    assert lifted.function(StandIn(), 4) == 41
    assert (lifted.name, lifted.line, lifted.requires) == ("Runner.step", 6, ("offset",))
    assert lifted.stripped == ("torch.inference_mode",)
    assert lifted.function.__qualname__ == "Runner.step"
    assert inspect.getsource(lifted.function).lstrip().startswith("def step")


def test_binding_decorators_of_a_method_are_dropped(make_tree):
    lifted = upstream.lift_method(make_tree({"vllm/m.py": METHODS}), "vllm/m.py", "Runner.plain")
    assert (lifted.function(3), lifted.stripped) == (3, ("staticmethod",))


def test_a_method_that_names_its_own_class_is_still_a_plain_function(make_tree):
    text = "class C:\n    K = 4\n    @staticmethod\n    def f(x):\n        return C.K + x\n"
    lifted = upstream.lift_method(make_tree({"vllm/m.py": text}), "vllm/m.py", "C.f")
    assert (inspect.isfunction(lifted.function), lifted.function(1)) == (True, 5)


def test_a_method_that_the_class_lacks_is_told_apart(make_tree):
    tree = make_tree({"vllm/m.py": METHODS})
    with pytest.raises(upstream.NotPresentError, match=r"does not define Runner\.leap"):
        upstream.lift_method(tree, "vllm/m.py", "Runner.leap")


def test_a_method_name_without_a_class_is_refused(make_tree):
    with pytest.raises(BadInputError, match=r"write it like Class\.method"):
        upstream.lift_method(make_tree({"vllm/m.py": METHODS}), "vllm/m.py", "offset")
