"""Kernels for a user's own torch.nn.Module: ``headrace optimize kernels path.py:Class``.

source.py    the file: its class, constructor's and forward's arguments
trace.py     what a call holds and which operators it runs
host.py      the process in which the file runs
problem.py   the module as the judge's Problem
stages.py    the loop's stages for a module
bound.py     the module with a kernel in place of its forward
loader.py    ``load``: the same from a pack, checked
"""

from headrace.optimize.modules.loader import load

__all__ = ["load"]
