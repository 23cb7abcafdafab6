"""ik_llama.cpp's library with llama-cpp-python's names, as far as `llama_cpp_logits.py` uses them.

    library = IkLlama(Path("ik_llama.cpp/build"))

Its structs of parameters change from commit to commit. They are passed by value, which copies as much as is declared
here, and the library reads its own part of the copy. So only the first fields are declared, and room for all others.
"""

import ctypes
import subprocess
from ctypes import POINTER, c_char, c_char_p, c_float, c_int8, c_int32, c_uint32, c_void_p
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_ROOM = 4096  # bytes, more than any of the structs


class _ModelParams(ctypes.Structure):
    _fields_ = [("all", c_char * _ROOM)]


class _ContextParams(ctypes.Structure):
    _fields_ = [
        ("seed", c_uint32),
        ("n_ctx", c_uint32),
        ("n_batch", c_uint32),
        ("n_ubatch", c_uint32),
        ("n_seq_max", c_uint32),
        ("n_threads", c_uint32),
        ("n_threads_batch", c_uint32),
        ("others", c_char * _ROOM),
    ]


class _Batch(ctypes.Structure):
    _fields_ = [
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
        ("others", c_char * 64),
    ]


# name: result, arguments
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "llama_backend_init": (None, []),
    "llama_model_default_params": (_ModelParams, []),
    "llama_context_default_params": (_ContextParams, []),
    "llama_model_load_from_file": (c_void_p, [c_char_p, _ModelParams]),
    "llama_init_from_model": (c_void_p, [c_void_p, _ContextParams]),
    "llama_n_vocab": (c_int32, [c_void_p]),
    "llama_n_threads": (c_uint32, [c_void_p]),
    "llama_n_threads_batch": (c_uint32, [c_void_p]),
    "llama_kv_cache_clear": (None, [c_void_p]),
    "llama_batch_init": (_Batch, [c_int32, c_int32, c_int32]),
    "llama_decode": (c_int32, [c_void_p, _Batch]),
    "llama_synchronize": (None, [c_void_p]),
    "llama_get_logits": (POINTER(c_float), [c_void_p]),
}


class IkLlama:
    """The library of one build. Flash attention is its default."""

    def __init__(self, build: Path) -> None:
        """Raises OSError if the library is not there."""
        ctypes.CDLL(str(build / "ggml/src/libggml.so"), mode=ctypes.RTLD_GLOBAL)
        library = ctypes.CDLL(str(build / "src/libllama.so"))
        for name, (result, arguments) in _FUNCTIONS.items():
            function = library[name]
            function.restype = result
            function.argtypes = arguments
            setattr(self, name, function)
        self.__version__ = commit_of(build)
        library["llama_backend_init"]()

    def Llama(  # noqa: N802 (llama-cpp-python's name)
        self,
        path: str,
        *,
        n_ctx: int,
        n_batch: int,
        n_ubatch: int,
        n_threads: int,
        n_threads_batch: int,
        **_others: object,
    ) -> SimpleNamespace:
        """Return a loaded model with a context. Raises RuntimeError if it cannot be loaded."""
        calls: Any = self
        model = calls.llama_model_load_from_file(path.encode(), calls.llama_model_default_params())
        if model is None:
            raise RuntimeError(f"{path} cannot be loaded")
        params = calls.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_batch = n_batch
        params.n_ubatch = n_ubatch
        params.n_threads = n_threads
        params.n_threads_batch = n_threads_batch
        context = calls.llama_init_from_model(model, params)
        if context is None:
            raise RuntimeError(f"{path} gets no context of {n_ctx} tokens")
        return SimpleNamespace(_ctx=SimpleNamespace(ctx=context), n_vocab=lambda: calls.llama_n_vocab(model))

    def llama_get_memory(self, context: int) -> int:
        """Return the context, which stands for its K/V here."""
        return context

    def llama_memory_clear(self, context: int, _data: bool) -> None:
        """Drop all K/V."""
        calls: Any = self
        calls.llama_kv_cache_clear(context)


def commit_of(build: Path) -> str:
    """Return the short commit of the source around a build; "unknown" without git."""
    done = subprocess.run(
        ["git", "-C", str(build), "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"
