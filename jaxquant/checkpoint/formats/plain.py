"""Safetensors files without quantization: every tensor is loaded as it is stored."""

from __future__ import annotations

from collections.abc import Iterable

from ..info import TensorInfo
from ..safetensors_files import SafetensorsFiles, SafetensorsFormat


class _Plain(SafetensorsFormat):
    name = "safetensors"

    def recognizes_config(self, files: SafetensorsFiles) -> bool:
        """Return whether no configuration speaks of a quantization."""
        # The names and the metadata that torchao and bitsandbytes are recognized by, without a configuration.
        has_others = "tensor_names" in files.metadata or any("quant_state.bitsandbytes" in n for n in files.entries)
        return not files.quantization and not has_others and not set(files.configs) - {"config.json"}

    def list_tensors(self, files: SafetensorsFiles) -> Iterable[TensorInfo]:
        """Return nothing: no tensor is quantized."""
        return ()


FORMAT = _Plain()
