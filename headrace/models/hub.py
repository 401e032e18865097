"""A model from the Hugging Face hub, or from its local cache, as a folder.

``HF_TOKEN``, ``HF_HUB_OFFLINE`` and ``HF_HOME`` mean what they mean to huggingface_hub.
"""

from __future__ import annotations

from pathlib import Path

from headrace.core.errors import ModelNotFoundError
from headrace.models.cache import Progress

TOKENIZER_FILE = "tokenizer.json"
_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "vocab.txt"]
_IGNORED = ["*/*", "consolidated*"]


def cached_tokenizer(name: str) -> Path | None:
    """The folder of ``org/name`` or ``org/name@revision`` in the local cache, if it holds a tokenizer."""
    import huggingface_hub

    repo, _, revision = name.partition("@")
    try:
        found = huggingface_hub.try_to_load_from_cache(repo, TOKENIZER_FILE, revision=revision or None)
    except huggingface_hub.errors.HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def fetch_snapshot(name: str, progress: Progress) -> Path:
    """The snapshot folder of ``org/name`` or ``org/name@revision``, only the files a text model needs.

    Raises ModelNotFoundError that tells apart offline, gated, private, misspelt and unreachable.
    """
    # Here, not above: it takes a fifth of a second, and most names never come this far.
    import huggingface_hub
    from huggingface_hub import errors

    repo, _, revision = name.partition("@")
    progress(f"fetching {repo}", 0, 1)
    try:
        folder = huggingface_hub.snapshot_download(
            repo, revision=revision or None, allow_patterns=_PATTERNS, ignore_patterns=_IGNORED
        )
    except errors.GatedRepoError as error:
        raise ModelNotFoundError(
            f"{repo} on the Hugging Face hub is gated and this account has no access",
            hint=f"Accept its terms at https://huggingface.co/{repo}, then set HF_TOKEN.",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelNotFoundError(f"{repo} on the Hugging Face hub has no revision {revision!r}") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"no model {repo} on the Hugging Face hub, or it is private; no such folder or short name either",
            hint="Check the spelling; for a private model set HF_TOKEN.",
        ) from error
    except errors.HFValidationError as error:
        raise ModelNotFoundError(f"{name!r} is no folder and no valid hub id: {error}") from error
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
        offline = huggingface_hub.constants.HF_HUB_OFFLINE
        raise ModelNotFoundError(
            f"{repo} is not in the local cache {huggingface_hub.constants.HF_HUB_CACHE}, and "
            + ("HF_HUB_OFFLINE forbids the network" if offline else "the Hugging Face hub cannot be reached"),
            hint="Unset HF_HUB_OFFLINE." if offline else "Check the network, or give a local folder.",
        ) from error
    except Exception as error:  # its HTTP library's errors share no base, and the library has changed
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelNotFoundError(
            f"fetching {repo} from the Hugging Face hub failed: {reason}",
            hint="Check the network and HF_TOKEN, or give a local folder.",
        ) from error
    progress(f"fetching {repo}", 1, 1)
    return Path(folder)
