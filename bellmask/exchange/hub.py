"""The hub: folders by OWNER/NAME, down and up. The only file that knows huggingface_hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from bellmask.utils.errors import UserError
from bellmask.utils.libraries import first_line

_NAME = re.compile(r"[A-Za-z0-9][\w.\-]*/[\w.\-]+")


def is_hub_name(text: str) -> bool:
    """True for OWNER/NAME."""
    return _NAME.fullmatch(text) is not None


def _library() -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise UserError("the hub needs huggingface_hub: pip install 'bellmask[hf]'") from None
    return huggingface_hub


def local_folder(name: str) -> Path:
    """A path as it is, or the local copy of a hub repository, fetched if need be.

    Where there is a folder OWNER, OWNER/NAME is a path, and a misspelt one is not looked for on the
    hub.
    """
    path = Path(name)
    if path.exists() or path.parent.is_dir() or not is_hub_name(name):
        return path
    library = _library()
    try:
        return Path(library.snapshot_download(repo_id=name))
    except Exception as error:  # no network, no such name, no access: all are the user's to mend
        raise UserError(
            f"there is no folder {name}, and the hub does not give it ({first_line(error)}); "
            "check the name, the network, and 'hf auth login' for private ones"
        ) from None


def push_folder(folder: Path, name: str, *, is_private: bool = False, api: Any = None) -> str:
    """Upload a whole folder as one commit to a model repository; its address."""
    if not is_hub_name(name):
        raise UserError(f"--push takes OWNER/NAME, not {name!r}")
    api = api or _library().HfApi()
    try:
        made = api.create_repo(name, repo_type="model", private=is_private, exist_ok=True)
        api.upload_folder(
            repo_id=name,
            folder_path=str(folder),
            repo_type="model",
            commit_message="Exported with bellmask",
        )
    except Exception as error:  # the export stays; only the upload must be done again
        raise UserError(
            f"{folder} is written, but could not be pushed to {name} ({first_line(error)}); log in "
            f"with 'hf auth login' and try: hf upload {name} {folder}"
        ) from None
    return str(made)
