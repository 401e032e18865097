"""What a pack must prove before its native code is run: that a trusted judge signed it as it is."""

from __future__ import annotations

from pathlib import Path

from headrace.core.errors import PackError


def check_pack(folder: Path) -> str:
    """The id of the pack in ``folder``, whose signature, files and evidence hold. Raises PackError."""
    # imported here because few have a pack, and signatures need a library of their own
    from headrace.optimize.packing import pack_id, verify_pack

    if not folder.is_dir():
        raise PackError(f"{folder} is no folder of a pack", hint="`headrace packs show latest` names one")
    verify_pack(folder)
    return pack_id(folder)
