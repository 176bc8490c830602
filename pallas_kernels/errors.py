"""Errors of the kernel package."""


class UnsupportedKernelError(NotImplementedError):
    """The requested implementation cannot run this shape, dtype or device; the message says why."""


class ShapeError(ValueError):
    """An argument of an op has a shape or dtype that does not fit the others."""
