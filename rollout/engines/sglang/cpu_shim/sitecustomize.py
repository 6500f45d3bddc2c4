"""Lets SGLang 0.5.23 run on a machine without CUDA, triton and sgl_kernel. Python imports it by its name from PYTHONPATH.

Active only where SGLANG_USE_CPU_ENGINE=1 and sglang can be found. It leans on SGLang's internals, so the version is
pinned exactly (bin/requirements-sglang.txt); with a CUDA machine none of it is needed.
"""

# mypy: ignore-errors

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types


class _KernelStub(types.ModuleType):
    """A module that has every function, so that it can be imported from; each raises when called."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_args, **_kwargs):
            raise NotImplementedError(f"sgl_kernel.{name} does not exist on this machine")

        return missing


class _KernelFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `sgl_kernel` and nothing below it: sgl_kernel.scalar_type must stay unimportable."""

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name == "sgl_kernel" else None

    def create_module(self, spec):
        module = _KernelStub(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module):
        pass


def _define_torchvision_operators():
    """torchvision's CUDA build registers fake kernels for operators that a CPU torch never defined; define them first."""
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def _install_triton_stub():
    """SGLang carries a triton stub for macOS; make it believe it is there."""
    import torch

    path = os.path.join(os.path.dirname(importlib.util.find_spec("sglang").origin), "_platform_stubs.py")
    spec = importlib.util.spec_from_file_location("_sgl_stubs", path)
    stubs = importlib.util.module_from_spec(spec)
    sys.modules["_sgl_stubs"] = stubs
    spec.loader.exec_module(stubs)
    stubs.sys = types.SimpleNamespace(platform="darwin", modules=sys.modules, meta_path=sys.meta_path)
    stubs.platform = types.SimpleNamespace(machine=lambda: "arm64")
    stubs._patch_non_blocking = lambda: None
    is_available = torch.backends.mps.is_available
    torch.backends.mps.is_available = lambda: True
    try:
        stubs.install_platform_stubs()
    finally:
        torch.backends.mps.is_available = is_available


if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" and importlib.util.find_spec("sglang"):
    sys.meta_path.append(_KernelFinder())
    _library = _define_torchvision_operators()  # kept: an operator library ends with its object
    if importlib.util.find_spec("triton") is None:
        _install_triton_stub()
