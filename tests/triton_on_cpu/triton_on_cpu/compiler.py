"""Triton asks each backend for a compiler. Kernels that are interpreted have none."""

from triton.backends.compiler import BaseBackend


class NoCompiler(BaseBackend): ...


NoCompiler.__abstractmethods__ = frozenset()
