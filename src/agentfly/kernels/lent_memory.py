"""GPU memory that can be given back and taken again at the same addresses (`LentMemory`).

CUDA graphs hold addresses, so a cache that is freed and allocated anew would make them worthless. The driver can reserve a
range of addresses apart from the memory behind it:

    reserved once  |-------- addresses --------|      tensors and graphs point here
    taken          |==== memory of the GPU ====|
    lent                                              other allocations, such as a learner's gradients, use the memory
"""

from __future__ import annotations

import ctypes
import weakref

import torch
from torch import Tensor

from ..errors import ConfigError

_PINNED, _DEVICE, _READ_WRITE = 1, 1, 3  # CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE, ..._PROT_READWRITE
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):  # CUmemAccessDesc
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _Range:
    """A reserved range of addresses. torch makes a tensor of it, and keeps this object alive as long as the tensor."""

    def __init__(self, num_bytes: int, device: int) -> None:
        self._driver = _open_driver()
        self._device = device
        self._properties = _Properties(type=_PINNED, location=_Location(_DEVICE, device))
        step = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(step), ctypes.byref(self._properties), ctypes.c_int(0))
        self.size = -(-num_bytes // step.value) * step.value
        address = ctypes.c_uint64()
        self._call(
            "cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(self.size), ctypes.c_size_t(0), ctypes.c_uint64(0),
            ctypes.c_uint64(0),
        )  # fmt: skip
        self.address = address.value
        self._mapped = [False]  # the finalizer shares it, and must not hold the range itself
        weakref.finalize(self, _end, self._driver, self.address, self.size, self._mapped)

    @property
    def mapped(self) -> bool:
        return self._mapped[0]

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.address, False), "strides": None, "version": 3}

    def map(self) -> None:
        handle = ctypes.c_uint64()
        self._call(
            "cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(self.size), ctypes.byref(self._properties), ctypes.c_uint64(0)
        )
        where = (ctypes.c_uint64(self.address), ctypes.c_size_t(self.size))
        try:
            self._call("cuMemMap", *where, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
        finally:
            self._call("cuMemRelease", handle)  # the memory stays until it is unmapped
        self._mapped[0] = True
        access = _Access(location=_Location(_DEVICE, self._device), flags=_READ_WRITE)
        self._call("cuMemSetAccess", *where, ctypes.byref(access), ctypes.c_size_t(1))

    def unmap(self) -> None:
        self._call("cuMemUnmap", ctypes.c_uint64(self.address), ctypes.c_size_t(self.size))
        self._mapped[0] = False

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code == _OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {self.size / 2**30:.2f} GiB")
        if code:
            raise RuntimeError(f"the CUDA driver's {name} failed with code {code}")


class LentMemory:
    """Memory of a CUDA device, lent at first. `tensor` holds its bytes; it may be read and written only while it is taken."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Raises ConfigError if the driver cannot reserve addresses, OutOfMemoryError if the memory is not there now."""
        torch.cuda.init()  # type: ignore[no-untyped-call]
        number = device.index if device.index is not None else torch.cuda.current_device()
        self._device = torch.device("cuda", number)
        self._range = _Range(num_bytes, number)
        self._make_room()
        self._range.map()  # torch asks the driver which device an address is on, which it knows of mapped ones only
        self.tensor: Tensor = torch.as_tensor(self._range, device=self._device)
        self._range.unmap()

    @property
    def lent(self) -> bool:
        return not self._range.mapped

    def lend(self) -> None:
        """Give the memory back to the device. What it holds is lost."""
        if not self.lent:
            torch.cuda.synchronize(self._device)
            self._range.unmap()

    def take(self) -> None:
        """Take the memory again, filled with zeros. Raises OutOfMemoryError."""
        if self.lent:
            self._make_room()
            self._range.map()
            self.tensor.zero_()

    def _make_room(self) -> None:
        """Return torch's unused blocks to the device if the free memory is not enough."""
        if torch.cuda.mem_get_info(self._device)[0] < self._range.size:
            torch.cuda.empty_cache()


def can_lend() -> bool:
    """Whether the driver of this machine can map memory to reserved addresses."""
    try:
        _open_driver()
    except ConfigError:
        return False
    return True


def _open_driver() -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ConfigError("memory cannot be lent: this machine has no CUDA driver (libcuda.so.1)") from error
    if not hasattr(driver, "cuMemAddressReserve"):
        raise ConfigError("memory cannot be lent: the CUDA driver is older than 10.2")
    return driver


def _end(driver: ctypes.CDLL, address: int, size: int, mapped: list[bool]) -> None:
    where = (ctypes.c_uint64(address), ctypes.c_size_t(size))
    if mapped[0]:
        driver.cuMemUnmap(*where)
    driver.cuMemAddressFree(*where)
