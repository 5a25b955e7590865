"""Models and runs on disk: safetensors and JSON, nothing unpickled, nothing half written.

A checkpoint is a JSON file that names the file of its tensors. Tensors are written under a new name, then the JSON file
is replaced in one step, then older tensors are deleted: whenever the process dies, one whole checkpoint is there.
"""

import json
import math
import os
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from . import layers
from .model import SequenceModel

FORMAT = 1
ENCODERS: dict[str, type[nn.Module]] = {
    **{kind.__name__: kind for kind in (layers.LMN, layers.MSLMN, layers.ClockworkRNN)},
    **{kind.__name__: kind for kind in (nn.RNN, nn.LSTM, nn.GRU)},
}
UNIQUE = "[0-9a-f]" * 12  # in the name of a file of tensors: nothing else in a folder is ever deleted
TORCH_OPTIONS = ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional")


class CheckpointError(ValueError):
    """A file that cannot be read or written as a checkpoint; the message says which, and what to do."""


def save(model: nn.Module, folder: str | Path) -> None:
    """Write a `SequenceModel`, or a layer, with every constructor argument, to ``folder``."""
    write(Path(folder), "model", {"model": describe(model)}, model.state_dict())


def load(folder: str | Path, device: torch.device | str = "cpu") -> Any:
    """The model that `save` wrote to ``folder``."""
    content, tensors = read(Path(folder), "model", device)
    model = build(_entry(content, "model", Path(folder) / "model.json"), Path(folder) / "model.json").to(device)
    fill(model, tensors, Path(folder) / "model.json")
    return model


def describe(model: nn.Module) -> dict[str, Any]:
    """What `build` needs to make the model's like."""
    if isinstance(model, SequenceModel):
        return {"class": "SequenceModel", "config": model.config, "encoder": describe(model.encoder)}
    kind = type(model).__name__
    if ENCODERS.get(kind) is not type(model):
        raise TypeError(
            f"only a SequenceModel and its encoders ({', '.join(ENCODERS)}) can be saved, got {kind}; "
            "save the state_dict of your own class yourself"
        )
    if isinstance(model, layers.ClockedLayer):
        config = model.config
    else:
        config = {name: getattr(model, name) for name in TORCH_OPTIONS}
        config |= {"proj_size": model.proj_size} if isinstance(model, nn.LSTM) else {}
        config |= {"nonlinearity": model.nonlinearity} if isinstance(model, nn.RNN) else {}
    dtype = next(model.parameters()).dtype
    return {"class": kind, "config": config, "dtype": str(dtype).removeprefix("torch.")}


def build(description: Any, file: Path) -> nn.Module:
    """A model with fresh weights from what `describe` gave; ``file`` is for messages."""
    expected = {"class", "config", "encoder" if _is_model(description) else "dtype"}
    if not isinstance(description, Mapping) or set(description) != expected:
        found = sorted(description) if isinstance(description, Mapping) else description
        raise CheckpointError(
            f"{file}: a model is described by {sorted(expected)}, got {found}; is it of this version?"
        )
    try:
        if _is_model(description):
            return SequenceModel(build(description["encoder"], file), **description["config"])
        kind = ENCODERS.get(description["class"])
        if kind is None:
            raise CheckpointError(f"{file}: there is no class {description['class']!r}, only {', '.join(ENCODERS)}")
        return kind(**description["config"]).to(getattr(torch, description["dtype"]))
    except (TypeError, AttributeError) as error:  # an unknown or missing argument, dtype
        raise CheckpointError(f"{file}: {error}; the file was changed, or is of another version") from error


def fill(model: nn.Module, tensors: Mapping[str, Tensor], file: Path) -> None:
    """Load weights that fit; none are changed if they do not."""
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in tensors.items()}
    if expected != found:
        name = sorted(expected.items() ^ found.items())[0][0]
        raise CheckpointError(
            f"{file}: these are weights of another architecture: {name} is {found.get(name, 'not there')}, "
            f"expected {expected.get(name, 'nothing of that name')}; build the model as it was saved"
        )
    model.load_state_dict(dict(tensors))


def write(
    folder: Path, name: str, content: Mapping[str, Any], tensors: Mapping[str, Tensor], indent: int | None = 1
) -> None:
    """``folder/name.json`` with ``content``, and the tensors in a file beside it, all or nothing."""
    weights = f"{name}-{uuid.uuid4().hex[:12]}.safetensors"
    text = json.dumps({"format": FORMAT, **content, "tensors": weights}, indent=indent)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f"{name}-{UNIQUE}.safetensors.tmp"):  # of a process that died
            left.unlink(missing_ok=True)
        temporary = folder / f"{weights}.tmp"
        save_file({key: value.detach().contiguous().cpu() for key, value in tensors.items()}, temporary)
        os.replace(temporary, folder / weights)
        write_text(folder / f"{name}.json", text)
    except (OSError, SafetensorError) as error:
        for path in (folder / weights, folder / f"{weights}.tmp"):
            with suppress(OSError):
                path.unlink(missing_ok=True)
        raise CheckpointError(
            f"cannot write a checkpoint to {folder}: {error}; make room, or choose a folder you can write to. "
            "What was there is as it was"
        ) from error
    for old in folder.glob(f"{name}-{UNIQUE}.safetensors"):
        if old.name != weights:
            old.unlink(missing_ok=True)


def read(folder: Path, name: str, device: torch.device | str = "cpu") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What `write` wrote."""
    file = folder / f"{name}.json"
    try:
        content = json.loads(file.read_text())
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}; is {folder} the right folder?") from error
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON ({error}); it was changed or damaged, take a copy") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{file} is not a checkpoint of format {FORMAT}; it is of another version or program")
    tensors = folder / Path(str(_entry(content, "tensors", file))).name
    try:
        return content, load_file(tensors, device=str(device))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {tensors} ({error}); it is damaged or missing, take a copy") from error


def joined(tensors: Mapping[str, Tensor]) -> tuple[list[tuple[str, str, list[int]]], dict[str, Tensor]]:
    """One long tensor of each dtype instead of hundreds of short ones, and where each lies: quick to write."""
    layout = [(name, str(value.dtype).removeprefix("torch."), list(value.shape)) for name, value in tensors.items()]
    parts: dict[str, list[Tensor]] = {}
    for (_, dtype, _), value in zip(layout, tensors.values(), strict=True):
        parts.setdefault(dtype, []).append(value.detach().flatten())
    return layout, {dtype: torch.cat(values) for dtype, values in parts.items()}


def separated(layout: Any, long: Mapping[str, Tensor], file: Path) -> dict[str, Tensor]:
    """What `joined` joined."""
    try:
        places = dict.fromkeys(long, 0)
        tensors = {}
        for name, dtype, shape in layout:
            start, count = places[dtype], math.prod(shape)
            tensors[name] = long[dtype][start : start + count].reshape(shape).clone()
            places[dtype] = start + count
        return tensors
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(
            f"{file}: its layout does not fit its tensors ({error}); it was changed or damaged"
        ) from error


def write_text(path: Path, text: str) -> None:
    """Replace a file in one step."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _entry(content: Mapping[str, Any], name: str, file: Path) -> Any:
    if name not in content:
        raise CheckpointError(f"{file} has no {name!r}; it was changed, or is of another version")
    return content[name]


def _is_model(description: Any) -> bool:
    return isinstance(description, Mapping) and description.get("class") == "SequenceModel"
