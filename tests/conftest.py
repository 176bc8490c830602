"""Set-up shared by all tests: shape checks on every call into the package, the `gpu` marker, fixed keys."""

from __future__ import annotations

import ctypes
import functools
import gc
import inspect
import os

import jax
import pytest
from jaxtyping import install_import_hook

PACKAGE = "ssv_jax"


def _register_dataclass_unchecked(original):
    """`jax.tree_util.register_dataclass` without shape checks when JAX rebuilds one of our pytrees.

    The import hook below checks the fields of a dataclass whenever `__init__` runs. JAX rebuilds pytrees with
    other leaves than arrays of the stated shape (stacked by `scan`, `ShapeDtypeStruct`, `None`, NumPy, axis
    numbers), so rebuilding must not check; constructing one in our code still does. Everything else stays as
    JAX has it: the fields are set by the class's own `__init__`.
    """

    @functools.wraps(original)
    def register(nodetype, data_fields=None, meta_fields=None, drop_fields=()):
        if not nodetype.__module__.startswith(PACKAGE):
            return original(nodetype, data_fields, meta_fields, drop_fields)
        if data_fields is None:
            fields = [f for f in nodetype.__dataclass_fields__.values() if f.init and f.name not in drop_fields]
            data_fields = [f.name for f in fields if not f.metadata.get("static", False)]
            meta_fields = [f.name for f in fields if f.metadata.get("static", False)]
        data_names, meta_names = tuple(data_fields), tuple(meta_fields)
        init = inspect.unwrap(nodetype.__init__)

        def flatten(node):
            return tuple(getattr(node, n) for n in data_names), tuple(getattr(node, n) for n in meta_names)

        def flatten_with_keys(node):
            data, meta = flatten(node)
            return tuple(zip(map(jax.tree_util.GetAttrKey, data_names), data, strict=True)), meta

        def unflatten(meta, data):
            node = object.__new__(nodetype)
            init(node, **dict(zip(data_names, data, strict=True)), **dict(zip(meta_names, meta, strict=True)))
            return node

        jax.tree_util.register_pytree_with_keys(nodetype, flatten_with_keys, unflatten, flatten)
        return nodetype

    return register


# Commands run in the test process turn the persistent cache on for good.
jax.config.update("jax_enable_compilation_cache", False)
# Both before anything imports the package. `test_typing_canary.py` shows that they work.
jax.tree_util.register_dataclass = _register_dataclass_unchecked(jax.tree_util.register_dataclass)
# Plain `beartype.beartype`: with a parameterised checker and several packages the hook silently does nothing.
install_import_hook(PACKAGE, "beartype.beartype")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the tests marked `gpu` where JAX sees no GPU; some long ones first, lest one process end on its own."""
    items.sort(key=lambda item: item.path.name not in ("test_real_model.py", "test_readme.py"))
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and jax.default_backend() != "gpu":
        skip = pytest.mark.skip(reason=f"needs an NVIDIA GPU; JAX runs on {jax.default_backend()} here")
        for item in gpu_items:
            item.add_marker(skip)


_MANY_MAPS = 15_000
_MUCH_MEMORY = 3 << 30


def _memory() -> tuple[int, int]:
    """Memory maps and resident bytes of this process; 0 where the kernel does not tell."""
    try:
        with open("/proc/self/maps", "rb") as maps, open("/proc/self/statm") as sizes:
            return sum(1 for _ in maps), int(sizes.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0, 0


@pytest.fixture(autouse=True, scope="module")
def _few_programs():
    """Drop compiled programs between files before the process has too many.

    Each takes several memory maps, and Linux allows 65,530 a process: beyond that, compiling aborts the process.
    """
    yield
    maps, resident = _memory()
    if maps > _MANY_MAPS or resident > _MUCH_MEMORY:
        jax.clear_caches()
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc keeps what was freed
        if trim is not None:
            trim(0)


@pytest.fixture(scope="module")
def quick_programs():
    """Code that is fast to make and slow to run, for tiny models: what LLVM makes of it is not what is tested."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def key() -> jax.Array:
    """A fixed key: split it, never use it twice."""
    return jax.random.key(20250728)
