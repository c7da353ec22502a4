# SPDX-License-Identifier: Apache-2.0
"""No attribute of another package's module, class or function is ever assigned."""

import ast

import pytest

from tests.conventions.foreign_writes import foreign_writes
from tests.conventions.sources import fail_on, findings

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]

CAUGHT = {
    "module attribute": "import torch\ntorch.compile = None",
    "dotted chain": "import torch\ntorch.cuda.Stream = None",
    "submodule import": "import torch.cuda\ntorch.cuda.Stream = None",
    "deep class attribute": "import transformers\ntransformers.models.foo.Bar.attr = 1",
    "import alias": "import torch.nn as nn\nnn.Linear = None",
    "imported class": "from vllm.sequence import Sequence\nSequence.patched = True",
    "renamed class": "from vllm.sequence import Sequence as S\nS.patched = True",
    "imported function": "from vllm.utils import helper\nhelper.cache = {}",
    "standard library": "import socket\nsocket.timeout = 1",
    "augmented": "import torch\ntorch.version.cuda += 'x'",
    "annotated": "import torch\ntorch.flag: bool = True",
    "tuple target": "import torch\na, torch.flag = 1, 2",
    "loop target": "import torch\nfor torch.flag in (1, 2): pass",
    "with target": "import torch\nwith open('x') as torch.file: pass",
    "del": "import torch\ndel torch.compile",
    "setattr": "import torch\nsetattr(torch, 'compile', None)",
    "setattr on a chain": "import torch\nsetattr(torch.cuda, name, None)",
    "delattr": "import torch\ndelattr(torch, 'compile')",
    "object.__setattr__": "from vllm import LLM\nobject.__setattr__(LLM, 'a', 1)",
    "type.__setattr__": "from vllm import LLM\ntype.__setattr__(LLM, 'a', 1)",
    "own __setattr__": "import torch\ntorch.__setattr__('a', 1)",
    "__dict__ item": "import torch\ntorch.__dict__['compile'] = None",
    "vars item": "import torch\nvars(torch)['compile'] = None",
    "vars update": "import torch\nvars(torch).update(compile=None)",
    "__dict__ pop": "import torch\ntorch.__dict__.pop('compile')",
    "item of a foreign mapping": "from transformers import MAPPING\nMAPPING['a'] = 1",
    "del item": "from transformers import MAPPING\ndel MAPPING['a']",
    "sys.modules item": "import sys\nsys.modules['triton'] = None",
    "through sys.modules": "import sys\nsys.modules['torch'].compile = None",
    "through import_module": "import importlib\nimportlib.import_module('vllm.x').y = 1",
    "through __import__": "__import__('torch').compile = None",
    "alias by assignment": "import torch\ncuda = torch.cuda\ncuda.Stream = None",
    "alias by walrus": "import torch\nif (cuda := torch.cuda):\n    cuda.Stream = None",
    "alias by loop": "from vllm import A, B\nfor cls in (A, B):\n    cls.x = 1",
    "alias of imported module": "import importlib\nm = importlib.import_module('vllm.x')\nm.y = 1",
    "in a function": "import torch\ndef f():\n    torch.compile = None",
    "imported in a function": "def f():\n    import torch\n    torch.compile = None",
    "global alias": "cuda = None\ndef f():\n    global torch\n    import torch\n    torch.a = 1",
    "in a method": "import torch\nclass A:\n    def f(self):\n        torch.compile = None",
    "optional import": "try:\n    import torch\nexcept ImportError:\n    torch = None\ntorch.a = 1",
    "in a lambda": "import torch\nf = lambda: setattr(torch, 'a', 1)",
    "in a comprehension": "import torch\n[setattr(torch, n, None) for n in names]",
    "__class__": "def f(model):\n    model.__class__ = Other",
    "__class__ of self": "class A:\n    def f(self):\n        self.__class__ = Other",
    "__class__ by setattr": "def f(model):\n    setattr(model, '__class__', Other)",
    "__bases__": "class A: pass\nA.__bases__ = (B,)",
    "attribute of a type": "def f(model):\n    type(model).forward = g",
    "attribute of a __class__": "def f(model):\n    model.__class__.forward = g",
}
ALLOWED = {
    "environment variable": "import os\nos.environ['A'] = 'b'",
    "environment by name": "from os import environ\nenviron['A'] = 'b'\ndel environ['A']",
    "attribute of self": "class A:\n    def f(self):\n        self.x = 1",
    "class attribute of self": "class A:\n    def f(self):\n        type(self).count = 1",
    "subclass": "import torch\nclass A(torch.X):\n    x = 1\n    def f(self):\n        self.y = 1",
    "instance we made": "import torch\nmodel = torch.nn.Linear(1, 1)\nmodel.training = False",
    "argument": "def f(config):\n    config.x = 1",
    "parameter hides import": "from vllm import request\ndef f(request):\n    request.x = 1",
    "local hides import": "from vllm import a\ndef f():\n    a = make()\n    a.x = 1",
    "import elsewhere": "def f():\n    from vllm import x\ndef g(x):\n    x.y = 1",
    "class scope": "b = mine()\nclass A:\n    from vllm import b\n    def f(s):\n        b.c = 1",
    "our class": "from vllm_omni.config import Stage\nStage.x = 1",
    "relative import": "from .config import Stage\nStage.x = 1",
    "our setattr": "def f(mine):\n    setattr(mine, 'x', 1)",
    "frozen dataclass": "class A:\n    def f(self):\n        object.__setattr__(self, 'x', 1)",
    "own mapping": "import torch\ncache = {}\ncache[torch.float32] = 1",
    "tensor item": "import torch\nrows = torch.zeros(2)\nrows[0] = 1",
    "reading": "import torch\nx = torch.cuda.Stream\ny = vars(torch)['compile']",
    "update of a plain dict": "def f(d):\n    d.update(a=1)\n    d.__dict__.update(a=1)",
}


@pytest.mark.parametrize("source", CAUGHT.values(), ids=CAUGHT)
def test_catches(source: str) -> None:
    assert len(foreign_writes(ast.parse(source))) == 1


@pytest.mark.parametrize("source", ALLOWED.values(), ids=ALLOWED)
def test_allows(source: str) -> None:
    assert foreign_writes(ast.parse(source)) == []


def test_finding_names_the_place() -> None:
    (finding,) = foreign_writes(ast.parse("import torch as t\n\nt.cuda.Stream = None"))
    assert finding == (3, "writes torch.cuda.Stream")


def test_package_writes_nothing_foreign() -> None:
    fail_on(
        findings(foreign_writes),
        "Extend other packages by subclassing or through what they offer for it (worker_cls, "
        "scheduler_cls, ModelRegistry, get_model_state_cls, ...), never by assignment.",
    )
