"""The part of TransferQueue that the trainers use, in memory: rows of fields by key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.utils.tensordict_utils import list_of_dict_to_tensordict


class StoredRows:
    """Replaces the module `transfer_queue`."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}

    def put(self, rows: Mapping[str, dict[str, Any]]) -> KVBatchMeta:
        """Store whole rows."""
        self.rows.update({key: dict(row) for key, row in rows.items()})
        return self._meta(list(rows))

    def kv_batch_get(
        self, keys: Sequence[str], partition_id: str, select_fields: Sequence[str] | None = None
    ) -> TensorDict:
        """Read fields. Fields that no row has are ignored, as by TransferQueue."""
        wanted = select_fields or list(self.rows[keys[0]])
        have = [name for name in wanted if any(name in self.rows[key] for key in keys)]
        columns = {name: [self.rows[key][name] for key in keys] for name in have}
        tensors = {
            name: torch.nested.as_nested_tensor(values, layout=torch.jagged)
            for name, values in columns.items()
            if isinstance(values[0], torch.Tensor)
        }
        others = {name: values for name, values in columns.items() if name not in tensors}
        rows = [{name: others[name][i] for name in others} for i in range(len(keys))]
        told = list_of_dict_to_tensordict(rows) if others else TensorDict({}, batch_size=len(keys))
        return told.update(tensors)

    def kv_batch_put(
        self, keys: Sequence[str], partition_id: str, fields: TensorDict, tags: Sequence[Any] = ()
    ) -> KVBatchMeta:
        """Add fields to rows."""
        for key in keys:
            self.rows.setdefault(key, {})
        for name, column in fields.items():
            values = column.unbind() if isinstance(column, torch.Tensor) else list(column)
            for key, value in zip(keys, values, strict=True):
                self.rows[key][name] = value
        return self._meta(keys)

    def _meta(self, keys: Sequence[str]) -> KVBatchMeta:
        fields = sorted({name for key in keys for name in self.rows[key]})
        return KVBatchMeta(partition_id="train", keys=list(keys), tags=[{} for _ in keys], fields=fields)
