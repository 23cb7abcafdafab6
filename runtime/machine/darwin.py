"""C functions of macOS through ctypes, without root: energy counters, GPU load, states of notifications.

IOReport is not documented by Apple; its functions are those that powermetrics calls. Every Core Foundation object is
checked for its type before it is read. Objects of functions named Create or Copy are released once.

`runtime.machine.sensors` reads through it, and stops at the first failure. No Mac is needed to test it:
tests/runtime/machine/test_darwin.py loads a library of the same functions whose objects count their references.
"""

import ctypes
import re
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_int, c_int32, c_int64, c_long, c_uint32, c_uint64, c_ulong, c_void_p

from msgspec import Struct

_FRAMEWORKS = "/System/Library/Frameworks"


class Libraries(Struct, frozen=True):
    """Paths of the system's libraries."""

    core_foundation: str = f"{_FRAMEWORKS}/CoreFoundation.framework/CoreFoundation"
    io_kit: str = f"{_FRAMEWORKS}/IOKit.framework/IOKit"
    io_report: str = "/usr/lib/libIOReport.dylib"
    system: str = "/usr/lib/libSystem.B.dylib"


LIBRARIES = Libraries()
_UTF8 = 0x08000100  # kCFStringEncodingUTF8
_SIGNED_64 = 4  # kCFNumberSInt64Type
_LONGEST = 256  # bytes of a channel's name
_JOULES = {"nJ": 1e-9, "uJ": 1e-6, "µJ": 1e-6, "mJ": 1e-3, "cJ": 1e-2, "dJ": 1e-1, "J": 1.0}
# Totals of each part, such as `GPU Energy` and `DIE_1_CPU Energy`; other channels (`PCPU0`) are parts of these. Ultra
# chips have one of each per die.
_COUNTED = re.compile(r"(?:DIE_\d+_)?(?:CPU Energy|GPU Energy|DRAM.*|ANE.*)")


def _declare(library: ctypes.CDLL, result: object, **parameters: list[object]) -> None:
    """Set result and parameter types of functions. Raises AttributeError if one is missing."""
    for name, types in parameters.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = types


class CoreFoundation:
    """Strings, numbers, arrays and dictionaries of Core Foundation."""

    def __init__(self, path: str = LIBRARIES.core_foundation) -> None:
        self._lib = lib = ctypes.CDLL(path)
        _declare(lib, None, CFRelease=[c_void_p])
        _declare(lib, c_ulong, CFGetTypeID=[c_void_p])
        _declare(lib, c_ulong, CFStringGetTypeID=[], CFNumberGetTypeID=[], CFArrayGetTypeID=[])
        _declare(lib, c_ulong, CFDictionaryGetTypeID=[])
        _declare(lib, c_long, CFArrayGetCount=[c_void_p], CFDictionaryGetCount=[c_void_p])
        _declare(lib, c_void_p, CFStringCreateWithCString=[c_void_p, c_char_p, c_uint32])
        _declare(lib, c_void_p, CFArrayGetValueAtIndex=[c_void_p, c_long], CFDictionaryGetValue=[c_void_p, c_void_p])
        _declare(lib, c_void_p, CFDictionaryCreateMutableCopy=[c_void_p, c_long, c_void_p])
        _declare(lib, ctypes.c_ubyte, CFStringGetCString=[c_void_p, c_char_p, c_long, c_uint32])
        _declare(lib, ctypes.c_ubyte, CFNumberGetValue=[c_void_p, c_long, c_void_p])

    @contextmanager
    def owned(self, reference: int | None) -> Iterator[int | None]:
        """Release an object at the end of the block. NULL is None."""
        try:
            yield reference
        finally:
            if reference:
                self._lib.CFRelease(reference)

    @contextmanager
    def string(self, text: str) -> Iterator[int]:
        """Make a string for the block. Raises MemoryError if there is none."""
        with self.owned(self._lib.CFStringCreateWithCString(None, text.encode(), _UTF8)) as made:
            if not made:
                raise MemoryError
            yield made

    def text(self, reference: int | None) -> str | None:
        """Return the text of a string; None for other objects and NULL."""
        buffer = ctypes.create_string_buffer(_LONGEST)
        if not self._is(reference, "String") or not self._lib.CFStringGetCString(reference, buffer, _LONGEST, _UTF8):
            return None
        return buffer.value.decode(errors="replace")

    def number(self, reference: int | None) -> int | None:
        """Return the value of a number; None for other objects and NULL."""
        value = c_int64()
        if not self._is(reference, "Number") or not self._lib.CFNumberGetValue(reference, _SIGNED_64, byref(value)):
            return None
        return value.value

    def items(self, reference: int | None) -> Iterator[int]:
        """Yield the dictionaries of an array; they live as long as it does."""
        if not self._is(reference, "Array"):
            return
        for index in range(self._lib.CFArrayGetCount(reference)):
            item: int | None = self._lib.CFArrayGetValueAtIndex(reference, index)
            if item and self._is(item, "Dictionary"):
                yield item

    def value(self, dictionary: int | None, key: str) -> int | None:
        """Return the object of a key, which lives as long as the dictionary; None if there is none."""
        if not self._is(dictionary, "Dictionary"):
            return None
        with self.string(key) as made:
            value: int | None = self._lib.CFDictionaryGetValue(dictionary, made)
            return value

    def mutable_copy(self, dictionary: int | None) -> int | None:
        """Return a copy of a dictionary, which the caller owns; None for other objects and NULL."""
        if not self._is(dictionary, "Dictionary"):
            return None
        count = self._lib.CFDictionaryGetCount(dictionary)
        made: int | None = self._lib.CFDictionaryCreateMutableCopy(None, count, dictionary)
        return made

    def _is(self, reference: int | None, kind: str) -> bool:
        """Return whether an object is of a kind: "String", "Number", "Array" or "Dictionary"."""
        return bool(reference) and self._lib.CFGetTypeID(reference) == getattr(self._lib, f"CF{kind}GetTypeID")()


class EnergyCounters:
    """Energy of CPU, GPU, memory and neural engine, from IOReport's group "Energy Model"."""

    def __init__(self, core: CoreFoundation, path: str = LIBRARIES.io_report) -> None:
        """Subscribe to the counters. Raises OSError if there are none."""
        self._core = core
        self._lib = ctypes.CDLL(path)
        _declare(self._lib, c_void_p, IOReportCopyChannelsInGroup=[c_void_p, c_void_p, c_uint64, c_uint64, c_uint64])
        _declare(
            self._lib,
            c_void_p,
            IOReportCreateSubscription=[c_void_p, c_void_p, POINTER(c_void_p), c_uint64, c_void_p],
            IOReportCreateSamples=[c_void_p, c_void_p, c_void_p],
            IOReportChannelGetChannelName=[c_void_p],
            IOReportChannelGetUnitLabel=[c_void_p],
        )
        _declare(self._lib, c_int64, IOReportSimpleGetIntegerValue=[c_void_p, c_int32])
        # Both are kept for the life of the process, as every sample needs them.
        with (
            core.string("Energy Model") as group,
            core.owned(self._lib.IOReportCopyChannelsInGroup(group, None, 0, 0, 0)) as channels,
        ):
            self._channels = core.mutable_copy(channels)
        subscribed = c_void_p()
        self._subscription = self._channels and self._lib.IOReportCreateSubscription(
            None, self._channels, byref(subscribed), 0, None
        )
        if not self._subscription:
            raise OSError("no energy counters")

    def joules(self) -> float | None:
        """Return the energy used since some moment; None if no counter has a known unit."""
        with self._core.owned(self._lib.IOReportCreateSamples(self._subscription, self._channels, None)) as sample:
            parts = [self._part(item) for item in self._core.items(self._core.value(sample, "IOReportChannels"))]
        known = [part for part in parts if part is not None]
        if not known:
            return None
        return sum(known)

    def _part(self, channel: int) -> float | None:
        """Return the joules of a channel; None for an unknown unit, and for channels that are parts of others."""
        name = self._core.text(self._lib.IOReportChannelGetChannelName(channel))
        unit = self._core.text(self._lib.IOReportChannelGetUnitLabel(channel))
        scale = _JOULES.get((unit or "").strip())
        if name is None or scale is None or not _COUNTED.fullmatch(name.strip()):
            return None
        return int(self._lib.IOReportSimpleGetIntegerValue(channel, 0)) * scale


class GPUStatistics:
    """Load and memory of the GPU, from the I/O registry's `IOAccelerator`."""

    def __init__(self, core: CoreFoundation, path: str = LIBRARIES.io_kit) -> None:
        self._core = core
        self._lib = ctypes.CDLL(path)
        _declare(self._lib, c_void_p, IOServiceMatching=[c_char_p])
        _declare(self._lib, c_uint32, IOServiceGetMatchingService=[c_uint32, c_void_p])
        _declare(self._lib, c_void_p, IORegistryEntryCreateCFProperty=[c_uint32, c_void_p, c_void_p, c_uint32])
        _declare(self._lib, c_int32, IOObjectRelease=[c_uint32])

    def read(self) -> tuple[float | None, int | None]:
        """Return (share of time that the GPU worked, bytes in use by all programs); None if unknown."""
        matching = self._lib.IOServiceMatching(b"IOAccelerator")  # consumed by the next call
        if not matching:
            return None, None
        service = self._lib.IOServiceGetMatchingService(0, matching)
        if not service:
            return None, None
        try:
            with (
                self._core.string("PerformanceStatistics") as key,
                self._core.owned(self._lib.IORegistryEntryCreateCFProperty(service, key, None, 0)) as properties,
            ):
                percent = self._core.number(self._core.value(properties, "Device Utilization %"))
                used = self._core.number(self._core.value(properties, "In use system memory"))
        finally:
            self._lib.IOObjectRelease(service)
        if percent is None:
            return None, used
        return min(1.0, percent / 100), used


def notify_state(name: str, path: str = LIBRARIES.system) -> int | None:
    """Return the state of a system notification, as `notifyutil -g NAME` prints it; None if unknown."""
    token = c_int()
    state = c_uint64()
    try:
        lib = ctypes.CDLL(path)
        _declare(lib, c_uint32, notify_register_check=[c_char_p, POINTER(c_int)], notify_cancel=[c_int])
        _declare(lib, c_uint32, notify_get_state=[c_int, POINTER(c_uint64)])
    except (OSError, AttributeError):  # not on a Mac
        return None
    if lib.notify_register_check(name.encode(), byref(token)) != 0:
        return None
    try:
        if lib.notify_get_state(token, byref(state)) != 0:
            return None
        return state.value
    finally:
        lib.notify_cancel(token)
