"""Paths and hub ids: local folders are used as they are, ids go through `huggingface_hub`."""

from __future__ import annotations

import os
import re
from pathlib import Path

from manylora.exceptions import HubError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?\Z")
TOKENIZER_FILES = ["*.json", "*.jinja", "*.txt", "tokenizer.model"]
MODEL_FILES = [*TOKENIZER_FILES, "*.safetensors"]
ADAPTER_FILES = ["*.json", "*.safetensors", "*.jinja"]
# Second copies of the weights in other layouts.
OTHER_LAYOUTS = ["original/*", "consolidated*.safetensors", "onnx/*", "openvino/*"]


def local_path(path: str) -> Path | None:
    """Return the local file or folder that `path` names, `~` expanded; None if there is none."""
    expanded = Path(path).expanduser()
    return expanded.absolute() if expanded.exists() else None


def looks_local(path: str) -> bool:
    """Whether `path` can only be a local path: absolute, relative with dots, `~`, or more than one slash."""
    return path.startswith(("/", ".", "~")) or not HUB_ID.match(path)


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
    from huggingface_hub import errors

    try:
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
