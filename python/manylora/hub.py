"""Paths and hub ids: local folders are used as they are, ids go through `huggingface_hub`.

A model on the hub is a folder of safetensors or, where its repository holds only GGUF files, one of those:
`owner/name` when there is one, else `owner/name:Q4_K_M` or `owner/name/file.gguf`.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from manylora.exceptions import AdapterError, HubError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?\Z")
TOKENIZER_FILES = ["*.json", "*.jinja", "*.txt", "tokenizer.model"]
MODEL_FILES = [*TOKENIZER_FILES, "*.safetensors"]
ADAPTER_FILES = ["*.json", "*.safetensors", "*.jinja"]
# `owner/name:Q4_K_M` and `owner/name/file.gguf`, in a folder of the repository or not.
GGUF_ID = re.compile(
    r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(:(?P<kind>[\w.-]+)|/(?P<file>[^\\]+\.gguf))\Z",
    re.IGNORECASE,
)
GGUF_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf\Z", re.IGNORECASE)
# Weights that are pickles: never opened, and never fetched either.
PICKLES = ("adapter_model.bin", "adapter_model.pt")
# Second copies of the weights in other layouts.
OTHER_LAYOUTS = ["original/*", "consolidated*.safetensors", "onnx/*", "openvino/*"]


def local_path(path: str) -> Path | None:
    """Return the local file or folder that `path` names, `~` expanded; None if there is none."""
    expanded = Path(path).expanduser()
    return expanded.absolute() if expanded.exists() else None


def looks_local(path: str) -> bool:
    """Whether `path` can only be a local path: absolute, relative with dots, `~`, or more than one slash."""
    return path.startswith(("/", ".", "~")) or not HUB_ID.match(path)


def repository(model: str) -> str:
    """Return the repository of a hub id that names a GGUF file in it; anything else as it is."""
    named = None if local_path(model) else GGUF_ID.match(model)
    return named["repository"] if named else model


def resolve(
    path: str,
    patterns: list[str],
    *,
    what: str,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | None = None,
) -> Path:
    """Return a local path for a path or hub id.

    Args:
        path: local path, or hub id such as `Qwen/Qwen2.5-0.5B-Instruct`.
        patterns: files to fetch.
        what: what it is, for errors.
        revision: branch, tag or commit.
        token: hub token; None uses the one that is logged in.
        cache_dir: where files are kept; None is huggingface_hub's own cache.

    Raises:
        HubError: offline and not in the cache, gated, or no such id.

    """
    found = local_path(path)
    if found is not None:
        return found
    if looks_local(path):
        # The native side says what is missing, in the words of its kind.
        return Path(path).expanduser().absolute()
    import huggingface_hub

    with _errors(path, what, revision):
        return Path(
            huggingface_hub.snapshot_download(
                path,
                revision=revision,
                token=token,
                cache_dir=cache_dir,
                allow_patterns=patterns,
                ignore_patterns=OTHER_LAYOUTS,
            )
        )


def resolve_model(
    path: str, *, revision: str | None = None, token: str | bool | None = None, cache_dir: str | None = None
) -> Path:
    """Return the local folder or GGUF file for a model's path or hub id.

    Raises:
        HubError: as `resolve`; or the repository holds GGUF files and which one is not said, or it is in parts.

    """
    found = local_path(path)
    if found is not None:
        return found
    named = GGUF_ID.match(path)
    if named:
        name, wanted = named["repository"], named["kind"] or named["file"]
        folder = None
    else:
        name, wanted = path, None
        folder = resolve(path, MODEL_FILES, what="model", revision=revision, token=token, cache_dir=cache_dir)
        if looks_local(path) or any(folder.glob("*.safetensors")):
            return folder
    import huggingface_hub

    with _errors(name, "model", revision):
        files = _files(name, revision, token, cache_dir)
    if folder is not None and not any(map(_is_model_gguf, files)):
        # The native side says what is missing.
        return folder
    chosen = choose_gguf(name, files, wanted)
    with _errors(name, "model", revision):
        return Path(huggingface_hub.hf_hub_download(name, chosen, revision=revision, token=token, cache_dir=cache_dir))


def resolve_adapter(path: str, name: str, *, token: str | bool | None = None) -> Path:
    """Return the local folder for an adapter's path or hub id.

    Raises:
        HubError: as `resolve`.
        AdapterError: the repository has its weights as a pickle only.

    """
    folder = resolve(path, ADAPTER_FILES, what="adapter", token=token)
    if not (local_path(path) or looks_local(path) or any(folder.glob("*.safetensors"))):
        _refuse_pickles(path, name, token)
    return folder


def _refuse_pickles(repository: str, name: str, token: str | bool | None) -> None:
    with _errors(repository, "adapter", None):
        files = _files(repository, None, token, None)
    pickle = next((file for file in PICKLES if file in files), None)
    if pickle and "adapter_model.safetensors" not in files:
        raise AdapterError(
            name,
            [pickle],
            f"`{repository}` has its weights in `{pickle}` only; pickles can run code and are never opened: save it "
            "again with PEFT (safe_serialization=True) to get `adapter_model.safetensors`",
        )


def fetch_adapter(repository: str, name: str, *, token: str | bool | None = None) -> Path:
    """Return the local folder for an adapter's repository on the hub, whatever lies on this machine under that name.

    Raises:
        HubError: as `resolve`.

    """
    import huggingface_hub

    with _errors(repository, "adapter", None):
        folder = Path(huggingface_hub.snapshot_download(repository, token=token, allow_patterns=ADAPTER_FILES))
    if not any(folder.glob("*.safetensors")):
        _refuse_pickles(repository, name, token)
    return folder


def choose_gguf(name: str, files: list[str], wanted: str | None) -> str:
    """Return the file to load out of a repository's files: the only GGUF file, or the one that is wanted.

    Args:
        name: the repository, for errors.
        files: paths in it.
        wanted: a file's path, or a type such as `Q4_K_M` that one file's name ends in.

    Raises:
        HubError: there is none or more than one of them, or it is in parts.

    """
    models = sorted(filter(_is_model_gguf, files))
    if wanted is None:
        fitting = models
    elif wanted.lower().endswith(".gguf"):
        fitting = [file for file in models if file == wanted]
    else:
        # A whole part of the name: `Q4_K` is not `Q4_K_M`.
        part = re.compile(rf"(^|[-._/]){re.escape(wanted)}([-./]|\Z)", re.IGNORECASE)
        fitting = [file for file in models if part.search(file[: -len(".gguf")])]
    whole = [file for file in fitting if not GGUF_PART.search(file)]
    if len(whole) == 1:
        return whole[0]
    listed = ", ".join(f"`{file}`" for file in (whole or models)[:20]) + (" ..." if len(whole or models) > 20 else "")
    if fitting and not whole:
        raise HubError(
            f"model `{name}`: `{fitting[0]}` is one part of a model that was split into several GGUF files, which is "
            f"not supported; merge them (llama-gguf-split --merge) and give the file's path, or choose another file: "
            f"it has {listed}"
        )
    example = (whole or models or ["file.gguf"])[0]
    hint = f"say which one, as `{name}/{example}` or `{name}:Q4_K_M`"
    if not models:
        raise HubError(f"model `{name}` has no GGUF file")
    if not whole:
        raise HubError(f"model `{name}` has no GGUF file `{wanted}`; it has {listed}: {hint}")
    which = "" if wanted is None else f" that `{wanted}` fits"
    raise HubError(f"model `{name}` has {len(whole)} GGUF files{which}: {listed}; {hint}")


def _is_model_gguf(file: str) -> bool:
    # Projectors of multimodal models and importance matrices lie beside the models.
    base = file.rsplit("/", 1)[-1].lower()
    return base.endswith(".gguf") and not base.startswith("mmproj") and "imatrix" not in base


def _files(name: str, revision: str | None, token: str | bool | None, cache_dir: str | None) -> list[str]:
    """Return the paths of a repository's files; those in the cache when the hub cannot be reached."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return huggingface_hub.list_repo_files(name, revision=revision, token=token)
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
        raise
    except (errors.OfflineModeIsEnabled, errors.HfHubHTTPError, OSError):
        folder = Path(
            huggingface_hub.snapshot_download(
                name, revision=revision, token=token, cache_dir=cache_dir, local_files_only=True
            )
        )
        return [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]


@contextlib.contextmanager
def _errors(path: str, what: str, revision: str | None) -> Iterator[None]:
    """Say what cannot be fetched, why, and what to do."""
    from huggingface_hub import errors

    try:
        yield
    except errors.HFValidationError as error:
        raise HubError(f"{what} `{path}` is no local path and no valid hub id: {error}") from error
    except errors.GatedRepoError as error:
        raise HubError(f"{what} `{path}` is gated: accept its terms on the hub and give a token (hf_token)") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise HubError(
            f"{what} `{path}` is no local folder and not in the hub cache, and the hub cannot be reached; "
            "give a local path, or fetch it while online"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise HubError(
            f"{what} `{path}` is no local folder and not on the hub (or private: give a token, hf_token)"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise HubError(f"{what} `{path}` has no revision `{revision}` on the hub") from error
    except (errors.HfHubHTTPError, OSError) as error:
        raise HubError(f"{what} `{path}` could not be fetched from the hub: {error}") from error


def hub_cache() -> Path:
    """Return huggingface_hub's cache folder: a root of its own when `lora_root` is set."""
    from huggingface_hub import constants

    return Path(os.path.expanduser(constants.HF_HUB_CACHE))
