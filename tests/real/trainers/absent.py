"""Stand-ins for the packages that TorchTitan, SkyRL and slime import and that need a GPU: vLLM, FlashAttention, ...

Any name of theirs is a class whose calls return what a decorator would; none of them does anything.
"""

# mypy: ignore-errors

import importlib.abc
import importlib.machinery
import sys
import types

TORCHTITAN = ("vllm", "monarch", "torchstore")
SKYRL = ("flash_attn",)
SLIME = ("sglang", "sglang_router", "megatron")


class _Type(type):
    def __getattr__(cls, name):
        return _named(name)

    def __getitem__(cls, _):
        return cls

    def __call__(cls, *arguments, **options):
        alone = len(arguments) == 1 and callable(arguments[0]) and not options
        return arguments[0] if alone else cls


def _named(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Type(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = _named
        return module

    def exec_module(self, module):
        pass


def stand_in(names) -> None:
    sys.meta_path.insert(0, _Finder(names))
