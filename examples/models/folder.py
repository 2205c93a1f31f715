"""A model's folder in Hugging Face's layout: config.json and safetensors files."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - NumPy learns bfloat16 from it
import numpy as np
from safetensors import SafetensorError, safe_open

from .errors import InputError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"there is no {path.name} in {path.parent}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} holds no JSON object")
    return content


class Tensors(contextlib.AbstractContextManager["Tensors"]):
    """The tensors of a folder by name, each read from its file when asked for.

    Either all are in `model.safetensors`, or `model.safetensors.index.json` says which
    file each is in.

    Raises:
      InputError: for a folder without either, or without one of the files.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._open = contextlib.ExitStack()
        if (folder / INDEX).exists():
            index = read_json(folder / INDEX).get("weight_map")
            if not isinstance(index, dict):
                raise InputError(f"{folder / INDEX} has no weight_map")
            if not all(isinstance(file, str) for file in index.values()):
                raise InputError(
                    f"{folder / INDEX} has weight_map entries that are no file names"
                )
            files = sorted(set(index.values()))
        elif (folder / WEIGHTS).exists():
            index, files = None, [WEIGHTS]
        else:
            raise InputError(f"there is neither {WEIGHTS} nor {INDEX} in {folder}")
        missing = [file for file in files if not (folder / file).is_file()]
        if missing:
            raise InputError(
                f"{len(missing)} of {len(files)} weight files are not in {folder}: "
                f"{', '.join(missing)}"
            )
        opened = {file: self._open_file(folder / file) for file in files}
        if index is None:
            index = dict.fromkeys(opened[WEIGHTS].keys(), WEIGHTS)
        self._holder = {name: opened[file] for name, file in index.items()}

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def names(self) -> set[str]:
        return set(self._holder)

    def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """The tensor `name`, which is to be of `shape` and a floating-point dtype.

        Raises:
          InputError: for a tensor that is not there, or is another.
        """
        if name not in self._holder:
            raise InputError(f"there is no tensor {name} in {self._folder}")
        try:
            tensor = self._holder[name].get_tensor(name)
        except (SafetensorError, TypeError) as error:
            raise InputError(f"tensor {name} cannot be read: {error}") from None
        if tensor.shape != shape:
            raise InputError(
                f"tensor {name} has shape {tensor.shape}, where config.json makes it "
                f"{shape}"
            )
        if tensor.dtype not in ("float32", "float16", "bfloat16"):
            raise InputError(
                f"tensor {name} is {tensor.dtype}; float32, float16 and bfloat16 are "
                "taken"
            )
        return tensor

    def _open_file(self, path: Path) -> Any:
        try:
            return self._open.enter_context(safe_open(path, framework="np"))
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path} is damaged or incomplete: {error}") from None
