"""The container format GGUF: metadata and where the tensors lie.

The ``gguf`` package knows the quantised types and decodes them; its reader, though, keeps several numpy views for
every string of the vocabulary, which for a small model takes longer and more memory than the weights themselves. This
one reads the same layout (versions 2 and 3) in one pass and keeps plain values.
"""

from __future__ import annotations

import mmap
import os
import struct
import weakref
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import gguf
import numpy as np
import numpy.typing as npt

from ksana.errors import ModelLoadError

ROPE_FACTORS = "rope_freqs.weight"
"""Name of a table of rope frequencies. It is no weight: :mod:`ksana.models.gguf_config` makes parameters of it."""

_MAGIC = b"GGUF"
_SUPPORTED_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where one tensor lies.

    Attributes:
        name: GGUF name, for example ``blk.0.attn_q.weight``.
        shape: as torch writes it, rows first.
        type: how the elements are encoded.
        offset: first byte in the file.
        num_bytes: encoded size.
    """

    name: str
    shape: tuple[int, ...]
    type: gguf.GGMLQuantizationType
    offset: int
    num_bytes: int

    @property
    def num_elements(self) -> int:
        """Elements of the tensor."""
        return prod(self.shape)

    @property
    def num_rows(self) -> int:
        """Rows of a matrix; a vector is one row."""
        return prod(self.shape[:-1])


class GGUFFile:
    """A mapped GGUF file: ``metadata`` by key and ``tensors`` by name.

    Raises:
        ModelLoadError: not a GGUF file, of another version, truncated, or with tensors of unknown types.
    """

    _in_use: ClassVar[weakref.WeakValueDictionary[tuple[object, ...], GGUFFile]] = weakref.WeakValueDictionary()

    @classmethod
    def open(cls, path: Path) -> GGUFFile:
        """The file, shared with those who use it now: reading its head, with the vocabulary in it, takes a while."""
        try:
            status = path.stat()
        except OSError:
            return cls(path)  # which says what is wrong
        key = (os.fspath(path), status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        file = cls._in_use.get(key)
        if file is None:
            file = cls._in_use[key] = cls(path)
        return file

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{path}: cannot be read: {error}") from error
        self.metadata, self.tensors = _Parser(self._data, path).parse()

    def get(self, key: str, expected: type[T]) -> T | None:
        """Metadata value of ``key``, None if absent; :class:`ModelLoadError` if it has another type."""
        value = self.metadata.get(key)
        if value is None or isinstance(value, expected):
            return value
        if expected is float and isinstance(value, int):
            return float(value)  # type: ignore[return-value]
        raise ModelLoadError(f"{self.path}: {key} must be {expected.__name__}, not {type(value).__name__}")

    def encoded_rows(self, tensor: GGUFTensor, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Bytes of rows ``start`` to ``stop`` of a tensor, as a view [stop - start, bytes per row] of the file."""
        row_bytes = tensor.num_bytes // tensor.num_rows
        array = np.frombuffer(self._data, np.uint8, (stop - start) * row_bytes, tensor.offset + start * row_bytes)
        return array.reshape(stop - start, row_bytes)

    def release_pages(self, tensor: GGUFTensor) -> None:
        """Let the system take back the pages of a tensor; they count as memory of this process until then."""
        if hasattr(mmap, "MADV_DONTNEED"):
            start = tensor.offset // mmap.PAGESIZE * mmap.PAGESIZE
            self._data.madvise(mmap.MADV_DONTNEED, start, tensor.offset + tensor.num_bytes - start)


class _Parser:
    """One pass over the head of the file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._position = 0

    def parse(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        try:
            return self._parse()
        except (struct.error, IndexError, UnicodeDecodeError, OverflowError) as error:
            raise self._damaged(f"its head ends or makes no sense at byte {self._position}") from error

    def _parse(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        if self._bytes(4) != _MAGIC:
            raise ModelLoadError(f"{self._path}: not a GGUF file (it does not begin with {_MAGIC.decode()})")
        version = self._scalar("<I")
        if version not in _SUPPORTED_VERSIONS:
            raise ModelLoadError(
                f"{self._path}: GGUF version {version} is not supported (only little-endian files of version 2 and 3)"
            )
        num_tensors, num_keys = self._scalar("<Q"), self._scalar("<Q")
        metadata = {}
        for _ in range(num_keys):
            key = self._string()
            metadata[key] = self._value(self._scalar("<I"))
        heads = [self._tensor_head() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0:
            raise self._damaged(f"general.alignment is {alignment!r}")
        start = (self._position + alignment - 1) // alignment * alignment
        return metadata, {name: self._place(name, shape, kind, start + offset) for name, shape, kind, offset in heads}

    def _tensor_head(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        # The fastest dimension is written first; torch names it last.
        shape = tuple(self._scalar("<Q") for _ in range(self._scalar("<I")))[::-1]
        return name, shape, self._scalar("<I"), self._scalar("<Q")

    def _place(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GGUFTensor:
        try:
            type_ = gguf.GGMLQuantizationType(kind)
        except ValueError as error:
            raise ModelLoadError(f"{self._path}: tensor {name} has the unknown type number {kind}") from error
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[type_]
        if not shape or min(shape) <= 0 or shape[-1] % block_size:
            raise self._damaged(f"tensor {name} has the shape {shape}")
        num_bytes = prod(shape) // block_size * block_bytes
        if offset + num_bytes > len(self._data):
            raise self._damaged(
                f"tensor {name} ends at byte {offset + num_bytes}, the file at {len(self._data)}: "
                "it is truncated, download it again"
            )
        return GGUFTensor(name, shape, type_, offset, num_bytes)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise self._damaged(f"metadata type {kind} at byte {self._position} is unknown")
        return self._scalar(_SCALARS[kind])

    def _array(self) -> list[Any]:
        kind, length = self._scalar("<I"), self._scalar("<Q")
        if kind in _SCALARS:
            size = struct.calcsize(_SCALARS[kind])
            values: list[Any] = np.frombuffer(self._bytes(length * size), np.dtype(_SCALARS[kind])).tolist()
            return values
        return self._strings(length) if kind == _STRING else [self._value(kind) for _ in range(length)]

    def _strings(self, length: int) -> list[Any]:
        """As many calls of :meth:`_string` would read, in a fraction of the time: vocabularies are long."""
        data, position, read_length = self._data, self._position, struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(length):
            start = position + 8
            position = start + read_length(data, position)[0]
            strings.append(str(data[start:position], "utf-8"))
        if position > len(data):
            raise IndexError
        self._position = position
        return strings

    def _string(self) -> str:
        return self._bytes(self._scalar("<Q")).decode("utf-8")

    def _scalar(self, format: str) -> Any:
        (value,) = struct.unpack_from(format, self._data, self._position)
        self._position += struct.calcsize(format)
        return value

    def _bytes(self, length: int) -> bytes:
        end = self._position + length
        if end > len(self._data):
            raise IndexError
        data = self._data[self._position : end]
        self._position = end
        return data

    def _damaged(self, why: str) -> ModelLoadError:
        return ModelLoadError(f"{self._path}: damaged GGUF file: {why}")
