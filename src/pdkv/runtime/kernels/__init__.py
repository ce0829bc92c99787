"""CPU kernels in plain C, compiled once for this machine (`build`), called through ctypes (`native`).

Without a C compiler everything still runs, on torch alone: `native.load` returns ``None``.
"""
